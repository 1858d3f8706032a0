"""A flipped bit in one replica is found and named on every mesh; healthy devices are never blamed."""

import re
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from spmdkit.checkpoints.replicas import ReplicaCheck, StartDiffers
from spmdkit.configs import load_config
from spmdkit.data.batches import train_batches
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.runtime.build_run import build
from support.faults import flip_in
from support.runs import write_config, write_language_config

MESH = DeviceMesh.simulated(8, data=2, fsdp=4)


def laid_out(spec, shape=(8, 12), dtype=jnp.float32):
    values = np.arange(np.prod(shape)).reshape(shape)
    return jax.device_put(jnp.asarray(values, dtype), NamedSharding(MESH.backend_mesh, PartitionSpec(*spec)))


def differences(check, state):
    return check.differences(check.begin(state))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8])
def test_names_the_device_with_a_flipped_bit(dtype):
    """One of eight replicas differs. Devices with another part of the array hold no replica of it."""
    state = {"whole": laid_out((), dtype=dtype), "split": laid_out(("data",), dtype=dtype), "step": laid_out((), ())}
    check = ReplicaCheck(state)
    assert check.paths == ("split", "step", "whole")
    assert differences(check, state) == []
    size = jnp.dtype(dtype).itemsize
    for path, byte, agreeing in (
        ("whole", 96 * size - 1, (0, 1, 2, 3, 4, 6, 7)),
        ("split", 0, (4, 6, 7)),
        ("step", 0, ...),
    ):
        found = differences(check, flip_in(state, path, check.devices[5], byte=byte, bit=3))
        assert [(each.path, each.odd) for each in found] == [(path, (5,))]
        assert agreeing is ... or found[0].agreeing == agreeing


def test_blames_neither_of_two_replicas():
    state = {"pair": laid_out(("fsdp",))}
    check = ReplicaCheck(state)
    (found,) = differences(check, flip_in(state, "pair", check.devices[5]))
    assert found == ("pair", (1, 5), ())


def test_a_first_state_that_differs_is_a_mistake_of_the_user():
    state = {"params/w": laid_out(("fsdp",)), "own": laid_out((("data", "fsdp"),))}
    check = ReplicaCheck(state)
    check.check_start(state, "unused")
    with pytest.raises(StartDiffers) as caught:
        check.check_start(flip_in(state, "params/w", check.devices[5]), "Correct init.")
    assert caught.value.exit_code == 2
    assert str(caught.value) == (
        "Before the first step, devices that hold copies of the same array hold other values:\n  "
        "params/w: cpu:1 (rank 0), cpu:5 (rank 0) differ from each other; with no majority, any may be at fault\n"
        "Correct init. Nothing was trained."
    )


def test_compares_only_arrays_with_replicas():
    state = {"own": laid_out((("data", "fsdp"),)), "shared": laid_out(("fsdp",))}
    check = ReplicaCheck(state)
    assert check.paths == ("shared",)
    assert 2 * check.bytes_compared == check.bytes_of_state
    assert ReplicaCheck({"own": state["own"]}).paths == ()


def test_only_checksums_cross_devices():
    """Each device hashes its own memory; one word for each array travels."""
    text = ReplicaCheck({"a": laid_out(()), "b": laid_out(("data",))}).compile().as_text() or ""
    moves = re.findall(r" = (.+?) (all-[a-z]+|collective-[a-z]+|reduce-scatter)(?:-start)?\(", text)
    assert [kind for _, kind in moves] == ["all-gather"], moves
    shape = moves[0][0]
    assert re.match(r"u32\[([\d,]*,)?2[],]", shape), "a word for each of two arrays"


MESHES = {
    "data": {"data": 8},
    "fsdp x data": {"fsdp": {"size": 4, "floor_bytes": 256}, "data": 2},
    "tensor": {"tensor": 2, "data": 4},
    "pipe": {"pipe": {"size": 2, "microbatches": 4}, "data": 4},
    "zero": {"data": {"size": 8, "zero": 2, "floor_bytes": 0}},
    "int8": {"data": {"size": 8, "compress": "int8"}},
    "local steps": {"data": {"size": 4, "local_steps": 2}, "fsdp": {"size": 2, "floor_bytes": 256}},
    "context": {"context": 2, "data": 4},
}


def tiny(folder, strategy):
    write = write_language_config if {"tensor", "pipe", "context"} & {*strategy} else write_config
    return build(load_config(write(folder, strategy=strategy, train={"steps": 4, "global_batch": 32})))


@pytest.mark.long_cases("context", "pipe", "tensor")
@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_finds_only_a_flipped_bit_under_every_strategy(name, tmp_path):
    """Sums and gathers of a strategy leave the same bits on every device that holds a replica."""
    built = tiny(tmp_path, MESHES[name])
    check, state = ReplicaCheck(built.step.abstract_state()), built.step.init(0)
    sharding = built.layouts.batch_sharding()
    batches = train_batches(built.splits.train, sharding, global_batch=32, seed=0, start_step=0, num_steps=4)
    for batch in islice(batches, 4):
        state, _ = built.step(state, batch)
        assert differences(check, state) == []
    path = next(each for each in check.paths if each.startswith("params/"))
    (found,) = differences(check, flip_in(state, path, check.devices[6], bit=1))
    assert found.path == path
    assert 6 in found.odd
    assert found.odd == (6,) or not found.agreeing
