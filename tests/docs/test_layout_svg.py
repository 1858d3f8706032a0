"""docs/making/layout_svg.py: a drawing shows each device with the parts that JAX places there."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from making.layout_svg import bars_of, of_layout
from spmdkit.models import TransformerConfig, transformer

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


def step_of(strategy):
    model = transformer(TransformerConfig(vocabulary=64, length=16, layers=4, width=32))
    plan = spmdkit.lay_out(model, strategy, devices=[f"cuda:{n}" for n in range(8)])
    return spmdkit.build_step(model, optax.adamw(1e-3), plan)


def test_every_chunk_of_a_ring_is_held_by_one_device_of_each_row():
    positions = next(bar for bar in bars_of(step_of({"context": 4, "data": 2}), PATH) if bar.name == "positions")
    for row in (positions.held[:4], positions.held[4:]):
        assert sorted(chunk for held in row for chunk in held) == list(range(positions.num_parts))
    assert positions.held[0] == (0, 7)
