"""A first step that is not finite names the ranges of its batch."""

import numpy as np
import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.training.steps.first_batch import FirstBatch, describe_ranges
from spmdkit.training.steps.not_finite import AT_FIRST, Diverged

BATCH = {
    "inputs": np.array([[-2.5, np.nan], [3.0, np.inf]], np.float32),
    "targets": np.array([0, 12], np.int32),
    "example": np.array([0, 1], np.int32),
}


def test_ranges_of_a_batch():
    assert describe_ranges(BATCH) == "inputs float32 from -2.5 to 3 (2 not finite); targets int32 from 0 to 12"
    assert describe_ranges({"x": np.full(2, np.nan, np.float32)}) == "x float32, all not finite"


def test_only_the_first_step_is_explained_by_its_batch():
    batches = FirstBatch([BATCH] * 8)
    assert len(list(zip(range(2), batches, strict=False))) == 2
    explained = batches.explain(Diverged(1, "the loss is nan", AT_FIRST))
    assert str(explained).startswith(f"Step 1: the loss is nan.{AT_FIRST} Its batch: inputs float32 from -2.5 to 3")
    assert (explained.step, explained.found) == (1, "the loss is nan")
    later = Diverged(2, "the loss is nan", "")
    assert batches.explain(later) is later


def test_the_first_batch_is_kept_for_a_few_steps_only():
    batches = FirstBatch([BATCH] * 8)
    assert len(list(batches)) == 8
    error = Diverged(1, "the loss is nan", "")
    assert batches.explain(error) is error


def test_errors_of_the_users_batches_are_no_end():
    with pytest.raises(UserError, match="StopIteration"):
        list(FirstBatch(map(lambda number: next(iter(())), range(3))))  # noqa: C417
