"""What follows a find: who is named, what is kept, and whether the fault is called transient or lasting."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from spmdkit.checkpoints.replicas import ReplicaCheck
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.runtime.guards.replica_guard import NAME, ReplicaGuard, ReplicasDiffer, describe_coverage, read_findings
from support.faults import flip_in

MESH = DeviceMesh.simulated(8, data=8).backend_mesh
STATE = {"w": jax.device_put(jnp.arange(12.0), NamedSharding(MESH, PartitionSpec()))}
CHECK = ReplicaCheck(STATE)


def flipped(device):
    return flip_in(STATE, "w", CHECK.devices[device])


@pytest.fixture
def guard(tmp_path):
    """Makes the guard of a new start of the same run, and the lines that it says."""

    def start():
        said: list[str] = []
        return ReplicaGuard(CHECK, tmp_path, 2, said.append, seconds=1), said

    return start


def test_a_find_names_array_device_and_rank(guard, tmp_path):
    with pytest.raises(ReplicasDiffer) as found:
        guard()[0].compare(7, flipped(3))
    message = str(found.value)
    assert found.value.exit_code == 75
    assert message.startswith("Step 7: devices that hold copies of the same array hold other bits:\n  w: cpu:3 (ran")
    assert "other bits than cpu:0 (rank 0), cpu:1 (rank 0), cpu:2 (rank 0), cpu:4" in message
    assert "shows if the fault was transient or is lasting" in message
    (kept,) = json.loads((tmp_path / NAME).read_text())["finds"]
    assert (kept["step"], kept["arrays"], kept["verdict"]) == (7, ["w"], "")
    assert kept["devices"][0].startswith("cpu:3 on ")


def test_a_second_find_on_the_same_device_is_lasting(guard, tmp_path):
    for device, expected in (
        (3, "shows if the fault"),
        (5, "shows if the fault"),
        (3, "It is not the first time: cpu:3 on "),
    ):
        with pytest.raises(ReplicasDiffer, match=expected):
            guard()[0].compare(7, flipped(device))
    assert [each.verdict for each in read_findings(tmp_path)] == ["", "", "lasting"]


def test_reports_transient_fault_once(guard, tmp_path):
    with pytest.raises(ReplicasDiffer):
        guard()[0].compare(7, flipped(3))
    again, said = guard()
    again.compare(6, STATE)
    assert not said, "the step is not computed again yet"
    again.compare(7, STATE)
    assert len(said) == 1
    again.compare(8, STATE)
    assert len(said) == 1
    assert "difference at step 7 on cpu:3" in said[0]
    assert "a transient fault" in said[0]
    assert [each.verdict for each in read_findings(tmp_path)] == ["transient"]


def test_every_few_steps_it_looks_without_waiting(guard):
    watching, _ = guard()
    watching.after_step(1, flipped(3))
    for number in (2, 3, 5):
        watching.after_step(number, STATE)
    watching.after_step(6, flipped(3))
    with pytest.raises(ReplicasDiffer, match="Step 6:"):
        watching.after_step(9, STATE)


def test_a_damaged_file_of_finds_is_as_none(guard, tmp_path):
    for text in ("", "{", '{"finds": [{"step": 1}]}', "[]"):
        (tmp_path / NAME).write_text(text)
        assert read_findings(tmp_path) == []
    guard()[0].compare(1, STATE)


def test_coverage_names_share_and_interval():
    line = describe_coverage(CHECK, 5)
    assert "(1 array, 100 % of the bytes) is compared every 5 steps and before every save." in line
