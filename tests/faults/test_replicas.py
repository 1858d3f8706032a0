"""A bit that flips in one device's copy while processes train: found, named, computed again; or called lasting."""

import json

import pytest
from matrix import UnderFaults
from misbehaviour import launch, write
from runs import assert_same_arrays, losses, spmdkit, state_arrays

from spmdkit.testing import Fault

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.faults, pytest.mark.timeout(1200)]


def run(folder, **variables):
    config = write(folder, strategy={"data": 8}, guards={"replicas_every": 5}, checkpoint={"every": 6})
    slowly = "0.2"  # each batch, so that the save of step 6 is whole before what is found at step 10 ends the attempt
    return config, launch(config, "local:2x4", "--restarts", "1", EACH=slowly, **variables)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    config, ended = run(tmp_path_factory.mktemp("undisturbed"))
    assert ended.returncode == 0, ended.stderr
    assert "% of the bytes of the state) is compared every 5 steps and before every save" in ended.stdout
    return config


def parameter(config):
    return next(path for path in state_arrays(config, 12) if path.startswith("params/"))


def test_a_transient_fault_ends_with_the_parameters_of_an_undisturbed_run(undisturbed, tmp_path):
    """A bit flips after step 7, is found at 10, and the steps since the checkpoint of step 6 are computed again."""
    path = parameter(undisturbed)
    _, ended = run(tmp_path / "flips", FLIP="1:7:once", FLIPPED=path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = ended.stdout + ended.stderr
    assert "Step 10: devices that hold copies of the same array hold other bits:" in said
    assert f"{path}: cpu:2049 (rank 1) has other bits than cpu:0 (rank 0), cpu:1 (rank 0)" in said
    assert "starting again from step 6" in said
    assert "did not come again when the steps were computed again: a transient fault." in said
    (find,) = json.loads((tmp_path / "flips" / "run" / "guards.json").read_text())["finds"]
    assert (find["step"], find["verdict"]) == (10, "transient")
    assert losses(tmp_path / "flips" / "run") == losses(undisturbed.parent / "run")
    found = state_arrays(undisturbed, 12, tmp_path / "flips" / "run" / "checkpoints")
    assert_same_arrays(found, state_arrays(undisturbed, 12))


def test_a_fault_that_comes_again_is_lasting_and_never_saved(undisturbed, tmp_path):
    """A bit flips after step 5, in every start: the state of step 6 is compared before it is saved."""
    _, ended = run(tmp_path / "flips", FLIP="1:5:always", FLIPPED=parameter(undisturbed))
    assert ended.returncode == 75, ended.stdout + ended.stderr
    assert "It is not the first time: cpu:2049 on " in ended.stderr
    assert "The fault is lasting: replace it" in ended.stderr
    assert not (tmp_path / "flips" / "run" / "checkpoints" / "6").exists()


@pytest.mark.parametrize("element", [0, -1], ids=["first element", "last element"])
def test_every_state_is_compared_before_it_is_saved_by_default(element, tmp_path):
    """Each process writes a slice of an array, and the checksum is of one replica: either would be damaged."""
    flip = Fault(kind="flip", rank=1, device=1, step=6, parameter="kernel", bit=22, element=element)
    run = UnderFaults(tmp_path, [flip], strategy={"data": 4})
    ended = run.launch()
    assert ended.code == 75, ended.stderr
    assert "Step 8: devices that hold copies of the same array hold other bits:" in ended.stderr
    assert "/kernel: cpu:2049 (rank 1) has other bits than cpu:0 (rank 0)" in ended.stderr
    assert sorted(each.name for each in (run.folder / "checkpoints").glob("[0-9]*")) == ["4"]
    verified = spmdkit("checkpoint", "verify", run.folder)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert run.launch().code == 0, "the same command goes on"
