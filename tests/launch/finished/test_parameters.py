"""Parameters of a checkpoint, on other layouts than they were saved from; of the rest of the state nothing is read."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from small_checkpoints import damage, host_state, placed, write
from small_runs import whole
from spmdkit.launch.finished.parameters import read_tree
from spmdkit.launch.inspection.stored import StoredCheckpoint
from spmdkit.training.checkpointing.errors import CheckpointError, DamagedCheckpoint


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write(tmp_path_factory.mktemp("parameters") / "run", host_state(10))


def abstract(params, devices):
    """Their shapes, on so many devices."""
    placed_there = placed(params, devices)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), placed_there)


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_parameters_are_laid_out_as_asked(run, devices):
    wanted = abstract(host_state(10).params, devices)
    found = read_tree(StoredCheckpoint(run / "checkpoints" / "10"), "params", wanted)
    for (path, array), expected in zip(whole(found).items(), jax.tree.leaves(host_state(10).params), strict=True):
        assert array.tobytes() == np.asarray(expected).tobytes(), path
    assert jax.tree.map(lambda leaf: leaf.sharding, found) == jax.tree.map(lambda leaf: leaf.sharding, wanted)


def test_a_part_that_several_devices_hold_is_read_once_and_no_more_than_asked(run, monkeypatch):
    read = []
    stored = StoredCheckpoint(run / "checkpoints" / "10")
    part = stored.part
    monkeypatch.setattr(stored, "part", lambda path, region: read.append((path, region)) or part(path, region))
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"))
    kernel = host_state(10).params["blocks"]["kernel"]
    sharding = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    norm = jax.ShapeDtypeStruct((16,), jax.numpy.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))
    wanted = {"blocks": {"kernel": jax.ShapeDtypeStruct(kernel.shape, kernel.dtype, sharding=sharding)}, "norm": norm}
    read_tree(stored, "params", wanted)
    assert sorted(path for path, _ in read) == ["params/blocks/kernel"] * 4 + ["params/norm"]
    assert sorted(region[1].start for path, region in read if path != "params/norm") == [0, 4, 8, 12]
    assert not [name for name in stored._stores if name.startswith("opt_state")]


def test_what_differs_from_the_model_is_named(run):
    wanted = abstract({"blocks": {"kernel": np.zeros((3, 16, 4), np.float32)}, "bias": np.zeros(2, np.float32)}, 8)
    with pytest.raises(CheckpointError) as raised:
        read_tree(StoredCheckpoint(run / "checkpoints" / "10"), "params", wanted)
    message = str(raised.value)
    assert "holds other params than the model of its config has, in 3 arrays:" in message
    assert "params/blocks/kernel: float32[3, 16, 8] in the checkpoint, float32[3, 16, 4] in this run" in message
    assert "params/bias: not in the checkpoint" in message
    assert "params/norm: only in the checkpoint" in message


def test_damage_is_found(tmp_path):
    folder = write(tmp_path / "run", host_state(10)) / "checkpoints" / "10"
    damage(folder)
    with pytest.raises(DamagedCheckpoint):
        read_tree(StoredCheckpoint(folder), "params", abstract(host_state(10).params, 8))


def test_other_bits_are_found_by_their_checksum(run, monkeypatch):
    stored = StoredCheckpoint(run / "checkpoints" / "10")
    part = stored.part

    def flipped(path, region):
        array = part(path, region).copy()
        if path == "params/norm":
            array.view(np.uint16)[0] ^= 1
        return array

    monkeypatch.setattr(stored, "part", flipped)
    with pytest.raises(DamagedCheckpoint, match=r"params/norm of 2 arrays read as other bits than were saved"):
        read_tree(stored, "params", abstract(host_state(10).params, 8))
