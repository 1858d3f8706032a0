"""What a fault changes in arrays: one element on one device, on a real mesh of 8."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from spmdkit.testing.faults import Fault, Moment
from spmdkit.testing.injector import Injector
from spmdkit.testing.journal import Journal


class State(NamedTuple):
    params: dict
    step: int = 0


@pytest.fixture
def mesh():
    return jax.make_mesh((2, 4), ("data", "fsdp"))


def at(fault: Fault, **moment) -> Moment:
    return Injector([fault], 0, Journal(None)).at(Moment(phase=fault.phase, step=3, **moment))


def pieces(array) -> list[np.ndarray]:
    return [np.asarray(shard.data) for shard in array.addressable_shards]


def test_a_bit_of_a_parameter_on_one_device(mesh):
    whole = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, PartitionSpec("fsdp")))
    params = {"bias": jnp.ones(3), "kernel": whole}
    found = at(Fault(kind="flip", parameter="kernel", device=5, bit=22), state=State(params)).state.params
    assert found["bias"] is params["bias"]
    before, after = pieces(whole), pieces(found["kernel"])
    changed = [device for device in range(8) if not np.array_equal(before[device], after[device])]
    assert changed == [5]
    assert after[5].reshape(-1)[0] == 1.5
    assert (after[5] != 1).sum() == 1
    assert found["kernel"].sharding == whole.sharding


def test_a_value_of_the_batch(mesh):
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    batch = {name: jax.device_put(jnp.ones((16, 2)), rows) for name in ("weights", "inputs")}
    batch["targets"] = jnp.zeros(16, jnp.int32)
    found = at(Fault(kind="nan", phase="batch"), batch=batch).batch
    assert int(jnp.isnan(found["inputs"]).sum()) == 1
    assert found["weights"] is batch["weights"]


def test_tokens_have_weights_that_are_floats(mesh):
    batch = {"targets": jnp.zeros(16, jnp.int32), "weights": jnp.ones(16)}
    assert int(jnp.isnan(at(Fault(kind="nan", phase="batch"), batch=batch).batch["weights"]).sum()) == 1


def test_a_step_is_left_out():
    assert at(Fault(kind="skip")).skipped
