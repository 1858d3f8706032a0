"""What a model is told of the mesh: whether anything is split, and which positions a device works on."""

import jax
import numpy as np
from jax.sharding import PartitionSpec
from spmdkit.parallel.context import ContextConfig
from spmdkit.parallel.expert import ExpertConfig
from spmdkit.parallel.model import ParallelContext
from spmdkit.parallel.sharding.parallel_context import held_positions, own_positions
from spmdkit.parallel.tensor import TensorConfig
from support import toy

LENGTH = 16
TENSOR, CONTEXT, EXPERT = TensorConfig(size=2), ContextConfig(size=2), ExpertConfig(size=2)


def test_any_split_work_counts():
    assert not ParallelContext(added={"mine": TensorConfig()}, platform="gpu").splits_anything
    for split in ({"tensor": TENSOR}, {"context": CONTEXT}, {"expert": EXPERT}, {"added": {"mine": TENSOR}}):
        assert ParallelContext(**split).splits_anything, split


def test_lists_options_that_send_to_neighbors():
    ring = TensorConfig(size=2, collective_matmul=True)
    assert ParallelContext(context=CONTEXT, tensor=ring).rings == (
        *("strategy.context.attention=ring", "strategy.tensor.collective_matmul"),
    )
    heads = ContextConfig(size=2, attention="all_to_all")
    assert ParallelContext(context=heads, tensor=TENSOR).rings == ()
    assert ParallelContext(tensor=TensorConfig(collective_matmul=True)).rings == (), "one device sends to nobody"


def positions(function, **sizes):
    """What each device of a mesh gets, devices in the mesh's order."""
    parallel = ParallelContext(context=ContextConfig(size=sizes["context"]), tensor=TensorConfig(size=sizes["tensor"]))
    spec = PartitionSpec(("context", "tensor"))
    mapped = jax.shard_map(
        lambda: function(parallel, LENGTH) + 0 * jax.lax.axis_index("tensor") + 0 * jax.lax.axis_index("context"),
        mesh=toy.mesh(**sizes).backend_mesh,
        in_specs=(),
        out_specs=spec,
    )
    count = sizes["context"] * sizes["tensor"]
    return np.asarray(jax.jit(mapped)()).reshape(count, -1)


def test_devices_along_tensor_hold_the_same_positions_and_own_a_share():
    held, own = (positions(function, context=2, tensor=2) for function in (held_positions, own_positions))
    assert held.shape == (4, LENGTH // 2)
    assert np.array_equal(held[0], held[1])
    assert sorted([*held[0], *held[2]]) == list(range(LENGTH))
    for group in (0, 2):
        assert np.array_equal(np.concatenate(own[group : group + 2]), held[group])
