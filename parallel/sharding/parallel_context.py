"""The parallel context of a plan, what a model is told of the mesh, and the positions of a row a device works on."""

from jax import Array, lax

from .. import tensor
from ..context import local_positions
from ..model import ParallelContext
from ..plan import MeshPlan

INSIDE = ("tensor", "context", "expert")
"""The strategies that live inside a model: the fields of a parallel context."""


def parallel_context(plan: MeshPlan) -> ParallelContext:
    """What the model of a plan splits its own work over: of these strategies, those that are not left to XLA."""
    return ParallelContext(**{name: plan.configs[name] for name in INSIDE if name in plan.manual_axes})


def held_positions(parallel: ParallelContext, length: int) -> Array:
    """Positions of a row that this device's `context` group works on, (length / context,) int32, inside `shard_map`."""
    return local_positions(length, parallel.context)


def own_positions(parallel: ParallelContext, length: int) -> Array:
    """Positions whose activations this device keeps between products: its `tensor` share of `held_positions`.

    Args:
        parallel: The split.
        length: Positions in a whole row.

    Returns:
        (length / (context * tensor),) int32, varying over both axes.
    """
    held = held_positions(parallel, length)
    if parallel.tensor.size == 1:
        return held
    size = held.shape[0] // parallel.tensor.size
    return lax.dynamic_slice_in_dim(held, lax.axis_index(tensor.AXIS) * size, size)
