"""The parallel context that a plan passes to a model, and the positions of a row on a device."""

from jax import Array, lax

from .. import tensor
from ..context import local_positions
from ..model import ParallelContext
from ..plan import MeshPlan
from .strategies import axes_that_split

FIELDS = ("tensor", "context", "expert")


def parallel_context(plan: MeshPlan) -> ParallelContext:
    """Returns the platform, and the options of the strategies that split the model's work, except those left to XLA."""
    configs = {axis: plan.configs[axis] for axis in axes_that_split("work") if axis in plan.manual_axes}
    named = {axis: configs.pop(axis) for axis in FIELDS if axis in configs}
    return ParallelContext(**named, added=configs, platform=plan.platform)


def held_positions(parallel: ParallelContext, length: int) -> Array:
    """Returns the positions of a row on this device's `context` group, (length / context,) int32, in `shard_map`."""
    return local_positions(length, parallel.context)


def own_positions(parallel: ParallelContext, length: int) -> Array:
    """Returns the positions of this device's activations between products: its share of `held_positions`.

    Args:
        parallel: The parallel context.
        length: The number of positions in a whole row.

    Returns:
        (length / (context * tensor),) int32, varying over both axes.
    """
    held = held_positions(parallel, length)
    if parallel.tensor.size == 1:
        return held
    size = held.shape[0] // parallel.tensor.size
    return lax.dynamic_slice_in_dim(held, lax.axis_index(tensor.AXIS) * size, size)
