"""Nested examples and flat batches."""

import numpy as np
import pytest
from spmdkit.data import BadDataError, eval_batches, from_arrays, nested
from spmdkit.data.names import flat

A, B, C = (np.full(2, value) for value in range(3))


@pytest.mark.parametrize(
    ("example", "names"),
    [
        ({"image": A, "targets": {"label": B, "box": {"size": C}}}, ["image", "targets/label", "targets/box/size"]),
        ((A, B), ["inputs", "targets"]),
        ((A, {"label": B, "box": C}), ["inputs", "targets/label", "targets/box"]),
        ([A, [B, C]], ["inputs", "targets/0", "targets/1"]),
        ({"ids": [1, 2, 3], "number": 4}, ["ids", "number"]),  # numbers are an array, not entries
    ],
)
def test_names_are_joined(example, names):
    assert list(flat(example)) == names


def test_a_third_entry_of_a_tuple_is_weights():
    assert list(flat((A, B, C))) == ["inputs", "targets", "weights"]
    with pytest.raises(ValueError, match="an example has 3 entries, and their names are a, b"):
        flat((A, B, C), ("a", "b"))


def test_there_and_back():
    tree = {"image": A, "targets": {"label": B, "box": {"size": C}}}
    assert nested(flat(tree)) == tree


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ((A, B, C, A), "an example has 4 entries, and their names are inputs, targets"),
        (3, "an example is a int; it is a dict of arrays"),
        ({"a/b": A, "a": {"b": B}}, "an example holds 'a/b' twice"),
    ],
)
def test_examples_that_have_no_names(example, message):
    with pytest.raises(ValueError, match=message):
        flat(example)


def test_nested_arrays_become_batches(sharding):
    train = {"image": np.ones((12, 2, 2), np.float32), "targets": {"label": np.arange(12), "box": np.ones((12, 4))}}
    splits = from_arrays(train)
    *_, last = eval_batches(splits.train, sharding, global_batch=8)
    assert set(last) == {"image", "targets/label", "targets/box", "weights", "example"}
    assert nested(last)["targets"]["box"].shape == (8, 4)
    assert np.asarray(last["weights"]).tolist() == [1] * 4 + [0] * 4  # one for each row: no single target to count


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"inputs": {"a": [1.0, np.nan]}}, "inputs/a of example 1 .* is nan"),
        ({"targets": {"box": [1.0, np.inf]}}, "targets/box of example 1 .* is inf"),
        ({"targets/box": [np.nan, 1.0], "weights": [1.0, 0.0]}, "targets/box of example 0 .* is nan"),
        ({"weights": {"box": [-1.0, 1.0]}}, "weights/box of example 0 .* is -1.0: a weight is a finite number"),
    ],
)
def test_nested_numbers_are_looked_at_as_others(arrays, message):
    with pytest.raises(BadDataError, match=message):
        from_arrays(arrays)


def test_targets_that_do_not_count_may_be_anything():
    assert from_arrays({"targets/box": [1.0, np.nan], "weights": [1.0, 0.0], "mine": [np.nan, 1.0]})
