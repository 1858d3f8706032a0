"""A bit that flips in one device's copy while processes train: found, named, computed again; or called lasting."""

import json

import pytest
from support.faults import Fault
from support.matrix import UnderFaults
from support.runs import assert_same_arrays, losses, state_arrays

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.faults, pytest.mark.timeout(1200)]


SLOWLY = Fault(kind="slow", rank=None, seconds=0.2)
"""So that the save of step 6 is complete before the comparison of step 10 ends the attempt."""


def run(folder, *flips):
    folder.mkdir(exist_ok=True)
    sections = {"strategy": {"data": 4}, "guards": {"replicas_every": 5}, "train": {"steps": 12, "global_batch": 16}}
    run = UnderFaults(folder, [*flips, SLOWLY], checkpoint={"every": 6}, **sections)
    return run, run.launch(restarts=1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    found, ended = run(tmp_path_factory.mktemp("undisturbed"))
    assert ended.code == 0, ended.stderr
    assert "% of the bytes) is compared every 5 steps and before every save" in ended.stdout
    return found.config


def parameter(config):
    return next(path for path in state_arrays(config, 12) if path.startswith("params/"))


def test_transient_bit_flip_keeps_parameters(undisturbed, tmp_path):
    """A bit flips after step 7, is found at 10, and the steps since the checkpoint of step 6 are computed again."""
    path = parameter(undisturbed)
    flip = Fault(kind="flip", rank=1, step=8, device=1, parameter=path.removeprefix("params/"), bit=16)
    _, ended = run(tmp_path / "flips", flip)
    assert ended.code == 0, ended.stdout + ended.stderr
    said = ended.stdout + ended.stderr
    assert "Step 10: devices that hold copies of the same array hold other bits:" in said
    assert f"{path}: cpu:2049 (rank 1) has other bits than cpu:0 (rank 0), cpu:1 (rank 0)" in said
    assert "restarting from step 6" in said
    assert "did not come again when the steps were computed again: a transient fault." in said
    (find,) = json.loads((tmp_path / "flips" / "run" / "guards.json").read_text())["finds"]
    assert (find["step"], find["verdict"]) == (10, "transient")
    assert losses(tmp_path / "flips" / "run") == losses(undisturbed.parent / "run")
    found = state_arrays(undisturbed, 12, tmp_path / "flips" / "run" / "checkpoints")
    assert_same_arrays(found, state_arrays(undisturbed, 12))


def test_repeated_bit_flip_is_never_saved(undisturbed, tmp_path):
    """A bit flips after step 5, in every start: the state of step 6 is compared before it is saved."""
    _, ended = run(tmp_path / "flips", Fault(kind="flip", rank=1, step=6, device=1, bit=16, times=9))
    assert ended.code == 75, ended.stdout + ended.stderr
    assert "It is not the first time: cpu:2049 on " in ended.stderr
    assert "The fault is lasting: replace it" in ended.stderr
    assert not (tmp_path / "flips" / "run" / "checkpoints" / "6").exists()
