"""The axes that rows are split over, asked for where a loss is traced."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from spmdkit.mesh.device_mesh import DeviceMesh
from spmdkit.parallel.model.row_axes import ROW_AXES, asks_for_batch_axes, batch_axes, noticing
from spmdkit.parallel.sharding.strategies import axes_that_split


def test_they_are_those_that_strategies_split_rows_over():
    assert set(ROW_AXES) == set(axes_that_split("rows"))


def test_on_one_device_there_are_none_and_a_mean_over_none_is_the_value():
    assert batch_axes() == ()
    assert float(jax.jit(lambda x: lax.pmean(x, batch_axes()))(3.0)) == 3.0


def test_on_a_mesh_they_are_those_with_several_devices():
    mesh = DeviceMesh((2, 1, 4), ("data", "expert", "fsdp")).backend_mesh
    seen = []

    def mean(x):
        seen.append(batch_axes())
        return lax.pmean(x.mean(), batch_axes())

    rows = jnp.arange(16.0)
    mapped = jax.shard_map(mean, mesh=mesh, in_specs=PartitionSpec(("data", "fsdp")), out_specs=PartitionSpec())
    assert float(jax.jit(mapped)(rows)) == 7.5
    assert seen == [("data", "fsdp")]


def test_who_asks_is_noticed():
    def asks(x):
        return jax.jit(lambda x: lax.pmean(x, batch_axes()))(x)

    for _ in range(2):  # an earlier trace hides nothing
        assert asks_for_batch_axes(asks, np.ones(3))
    assert not asks_for_batch_axes(lambda x: x.sum(), np.ones(3))
    with noticing() as outer:
        assert not asks_for_batch_axes(lambda x: x, 1.0)
    assert outer == []
