"""The batches of a run: from any step on those of the whole run, without those that are left out; spoilt values."""

from contextlib import closing

import numpy as np
import pytest
from runs import write_config
from spmdkit.configs import load_config
from spmdkit.data.source import BadDataError
from spmdkit.launch.run.batches import batches_after, check_first_batch, check_position, data_position
from spmdkit.launch.run.build import build
from spmdkit.mesh.errors import UserError

STREAM = """
import numpy as np
from spmdkit.data import from_batches

def batch(value):
    return {"inputs": np.full((16, 64), value, np.float32), "targets": np.zeros(16, np.int64)}

def spoilt(config):
    return from_batches([batch(0.0), batch(np.nan)], [batch(0.0)])
"""


def examples(run, start, left_out=()):
    """The numbers of the samples of each batch."""
    with closing(batches_after(start, run, left_out)) as batches:
        return [np.asarray(batch["example"]).tolist() for batch in batches]


def test_from_any_step_on_they_are_those_of_the_whole_run(tmp_path):
    run = build(load_config(write_config(tmp_path, train={"steps": 5, "global_batch": 16})))
    whole = examples(run, 0)
    assert whole == [[*range(16 * step, 16 * step + 16)] for step in range(5)]
    assert examples(run, 3) == whole[3:]
    assert examples(run, 0, left_out={1})[:4] == [whole[0], *whole[2:]]


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_spoilt_values_reach_the_step_where_the_run_goes_on_after_them(policy, tmp_path, monkeypatch):
    (tmp_path / f"spoilt_{policy}.py").write_text(STREAM)
    monkeypatch.syspath_prepend(tmp_path)
    data = {"source": f"spoilt_{policy}:spoilt", "prefetch": 0}
    train = {"steps": 2, "global_batch": 16, "not_finite": policy}
    run = build(load_config(write_config(tmp_path, data=data, train=train)))
    with closing(batches_after(0, run)) as batches:
        assert np.isfinite(next(batches)["inputs"]).all()
        if policy == "skip":
            assert np.isnan(next(batches)["inputs"]).all()
        else:
            with pytest.raises(BadDataError, match="inputs"):
                next(batches)


def test_notes_how_far_the_data_was_read():
    assert data_position(0, ()) == {"batches": 0, "left_out": []}
    assert data_position(10, ()) == {"batches": 10, "left_out": []}
    assert data_position(10, {14}) == {"batches": 10, "left_out": []}, "a rollback after the checkpoint"
    assert data_position(10, {7, 3}) == {"batches": 12, "left_out": [3, 7]}
    check_position({}, 10, {3})  # of an earlier version
    check_position({"data": {"batches": 10, "left_out": []}}, 10, {14})
    with pytest.raises(
        UserError, match=r"after 11 batches of the data, of which \[3\] were left out.*now gives 11 and \[4\]"
    ):
        check_position({"data": {"batches": 11, "left_out": [3]}}, 10, {4})


def test_rejects_a_first_batch_that_was_read_before(tmp_path):
    run = build(load_config(write_config(tmp_path, train={"steps": 5, "global_batch": 16})))
    with closing(batches_after(2, run, {0})) as batches:
        batch = next(batches)
    check_first_batch(batch, 2, {0})
    for step, left_out in ((3, {0}), (1, {0}), (2, ())):
        with pytest.raises(RuntimeError, match="begins with sample 48 instead of"):
            check_first_batch(batch, step, left_out)
