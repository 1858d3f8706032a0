"""ZeRO stages 1 and 2: copies of the parameters on every device of `data`, the rest of the state in shards.

Use it where the parameters fit on one device, and parameters, gradients and optimizer state together do not: Adam's
moments alone are twice the parameters. Take stage 1 with several microbatches, which then communicate once; stage 2
where whole gradients do not fit either; `fsdp` where the parameters themselves do not.

Syntax, for a parameter W with optimizer moments m and the axis `data` of size N:

    stage 1    dW[D, F] {U_data} = In[B_data, D] . dOut[B_data, F]                summed over microbatches, locally
               dW[D_data, F] = reduce-scatter over data of dW[D, F] {U_data}      once a step
    stage 2    dW[D_data, F] = reduce-scatter over data of dW[D, F] {U_data}      in backward, as each block is done
    both       m[D_data, F], W[D_data, F] = update(dW[D_data, F])                 no communication
               W[D, F] = all-gather over data of W[D_data, F]                     once a step, on the critical path

1. A parameter of at least `floor_bytes` gets a second layout: its own, split once more, over `data`. The optimizer's
   state and the reduced gradient live there; smaller ones are summed with the loss, as under data parallelism.
2. Stage 1 keeps a whole local gradient until the step ends and communicates once, however many microbatches there are.
3. Stage 2 never has a whole gradient but that of the block at hand, and communicates for each microbatch.
4. After the update, XLA gathers the new parameters where they are stored: the resharding of a `jit` output.
5. With `fsdp` beside it, all of this happens to FSDP's shards: state over data x fsdp, parameters over fsdp.

Bytes a step, for P elements: reduce-scatter P x reduce width (stage 2: for each microbatch), all-gather P x stored
width; a ring moves (N - 1) / N of that: data parallelism's all-reduce, cut in its two halves. Compute-bound as data
parallelism.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", sections 5.1
and 5.2.
"""

from collections.abc import Collection
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..layouts.split_dim import split_further
from ..layouts.tensor_layout import TensorLayout
from .collectives import Collective, StepCounts, wire_bytes
from .plan import (
    MeshPlan,
    Parameter,
    ShardingPlan,
    as_stored,
    no_problems,
    splits_nothing,
    summed_elsewhere,
    unchanged,
)

AXIS = "data"
OPTIONS = None
SPLITS = ()
layout = splits_nothing
used_layout = as_stored
check = no_problems
begin = unchanged
reduce = summed_elsewhere


def update_layout(parameter: Parameter, placed: TensorLayout, plan: MeshPlan) -> tuple[TensorLayout, str]:
    """Where a gradient and the optimizer's state live: as the parameter, split over `data` as well.

    Args:
        parameter: The parameter.
        placed: Where it is stored.
        plan: Which axis does what.
    """
    if plan.zero == 0:
        return placed, ""
    config, first = plan.configs["data"], int(parameter.stacked)
    parts = prod(placed.parts_of_dim(dim) for dim in range(first, len(parameter.shape)))
    num_bytes = prod(parameter.shape[first:]) * jnp.dtype(parameter.dtype).itemsize // parts
    if num_bytes < config.floor_bytes or AXIS in placed.used_axes:
        return placed, ""
    found = split_further(placed, parameter.shape, plan.mesh, AXIS, first=first)
    return (found[0], f"zero: dim {found[1]} over data") if found else (placed, "")


def finish(gradients: Any, plan: ShardingPlan) -> Any:
    """Stage 1: scatters the gradients of a whole step."""
    if plan.zero != 1:
        return gradients
    reduce_dtype = plan.options.precision.reduce
    return scatter_gradients(gradients, plan.table.layouts, plan.update_table.layouts, reduce_dtype)


def scatter_gradients(gradients: Any, layouts: Any, update_layouts: Any, reduce_dtype: str) -> Any:
    """Stage 1: sums gradients over `data` and keeps this device's shards of them.

    Args:
        gradients: Per-device gradients, laid out as their parameters, summed over all microbatches.
        layouts: The parameters' `TensorLayout`s.
        update_layouts: Those of the update, from `update_layout`.
        reduce_dtype: The dtype of the sums.

    Returns:
        Gradients in their own dtype, laid out as the update; those that stay whole are unchanged: partial sums.
    """

    def scatter(gradient: Array, layout: TensorLayout, update: TensorLayout) -> Array:
        dim = _scattered_dim(layout, update)
        if dim is None:
            return gradient
        summed = lax.psum_scatter(gradient.astype(reduce_dtype), AXIS, scatter_dimension=dim, tiled=True)
        return summed.astype(gradient.dtype)

    return jax.tree.map(scatter, gradients, layouts, update_layouts)


def gradient_carriers(params: Any, layouts: Any, update_layouts: Any) -> Any:
    """Stage 2: what backward differentiates with respect to: a shard of the update's layout for each parameter.

    Only the carrier's gradient is of use (`fsdp.attach` scatters into it); its value is never read, so it is zero. A
    parameter that both layouts place alike is its own carrier.
    """

    def carrier(leaf: Array, layout: TensorLayout, update: TensorLayout) -> Array:
        dim = _scattered_dim(layout, update)
        if dim is None:
            return leaf
        shape = list(leaf.shape)
        shape[dim] //= layout.mesh.axis_size(AXIS)
        return lax.slice(leaf, [0] * leaf.ndim, shape) * 0

    return jax.tree.map(carrier, params, layouts, update_layouts)


def _scattered_dim(layout: TensorLayout, update: TensorLayout) -> int | None:
    for dim in range(len(update.axes)):
        if AXIS in update.axes_of_dim(dim) and AXIS not in layout.axes_of_dim(dim):
            return dim
    return None


def cost(plan: ShardingPlan, counts: StepCounts, platform: str) -> list[Collective]:
    """The gathers of updated parameters and, for stage 1, the reduce-scatters of gradients; stage 2's are FSDP's."""
    width = wire_bytes(plan.options.precision.reduce, platform)
    scattered = _scattered(plan, without=plan.frozen) if plan.zero == 1 else []
    scatters = [Collective("reduce-scatter", (AXIS,), 1, elements * width) for _, elements in scattered]
    return gathers(plan, platform) + scatters


def gathers(plan: ShardingPlan, platform: str) -> list[Collective]:
    """The gathers of updated parameters alone, which XLA adds to the update."""
    return [
        Collective("all-gather", (AXIS,), 1, elements * wire_bytes(dtype, platform))
        for dtype, elements in _scattered(plan)
    ]


def _scattered(plan: ShardingPlan, without: Collection[str] = ()) -> list[tuple[Any, int]]:
    """The stored dtype of each parameter whose update is split further, and its elements on a device."""
    rows = zip(plan.table.rows, plan.update_table.rows, strict=True)
    return [
        (row.dtype, prod(row.layout.shard_shape(row.shape)))
        for row, target in rows
        if _scattered_dim(row.layout, target.layout) is not None and row.path not in without
    ]
