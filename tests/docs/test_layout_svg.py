"""docs/making/layout_svg.py: a drawing shows each device with the parts that JAX places there."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from making.layout_svg import of_layout

import spmdkit

PATH = "blocks/mlp/up"


@pytest.mark.parametrize(
    "axes", [("fsdp", "tensor"), ("tensor", None), (None, ("fsdp", "tensor")), (None, None)], ids=str
)
def test_shards_match_jax(axes):
    mesh = spmdkit.DeviceMesh.simulated(8, fsdp=4, tensor=2)
    layout, shape = spmdkit.TensorLayout(axes, mesh), (32, 64)
    numbers = np.arange(32 * 64).reshape(shape)
    placed = jax.device_put(numbers, NamedSharding(mesh.backend_mesh, layout.spec))
    corners = {shard.device: int(np.asarray(shard.data)[0, 0]) for shard in placed.addressable_shards}
    order = sorted(set(corners.values()))  # parts in the order of their first element: rows first
    wanted = [(order.index(corners[device]),) for device in mesh.backend_mesh.devices.flat]
    bar = of_layout("parameter", layout)
    assert (bar.num_parts, list(bar.held)) == (len(order), wanted)
