"""ZeRO stages 1 and 2: every device of `data` holds all parameters and a shard of the rest of the state.

Use it if the parameters fit on one device, but parameters, gradients and optimizer state together do not: Adam's
moments alone take twice the memory of the parameters. Choose stage 1 with several microbatches, since it communicates
once per step. Choose stage 2 if whole gradients do not fit either, and `fsdp` if the parameters do not fit.

Syntax, for a parameter W with optimizer moments m and the axis `data` of size N:

    stage 1    dW[D, F] {U_data} = In[B_data, D] . dOut[B_data, F]                summed over microbatches, locally
               dW[D_data, F] = reduce-scatter over data of dW[D, F] {U_data}      once per step
    stage 2    dW[D_data, F] = reduce-scatter over data of dW[D, F] {U_data}      in backward, after each block
    both       m[D_data, F], W[D_data, F] = update(dW[D_data, F])                 no communication
               W[D, F] = all-gather over data of W[D_data, F]                     once per step, on the critical path

1. A parameter of at least `floor_bytes` gets a second layout: its own layout, with one dim also split over `data`. The
   optimizer's state and the reduced gradient have this layout. Gradients of smaller parameters are summed with the
   loss, as under data parallelism.
2. Stage 1 keeps a whole local gradient until the end of the step, and communicates once for any number of microbatches.
3. Stage 2 holds the whole gradient of only one block at a time, and communicates for each microbatch.
4. After the update, XLA gathers the new parameters into their stored layout, by resharding an output of `jit`.
5. Together with `fsdp`, all of this applies to FSDP's shards: the state is split over data x fsdp, the parameters over
   fsdp.

Bytes per step, for P elements: the reduce-scatter moves P x reduce width (in stage 2, for each microbatch), the
all-gather P x stored width. A ring moves (N - 1) / N of that. Together they are the two halves of data parallelism's
all-reduce, and the step is compute-bound under the same condition.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", sections 5.1
and 5.2.
"""

from collections.abc import Collection
from typing import Any

import jax
from jax import Array, lax

from ..layouts.tensor_layout import TensorLayout, split_further
from .collectives import Collective, StepCounts, keep_split, wire_bytes
from .plan import MeshPlan, Parameter, ShardingPlan, as_stored, no_problems, splits_nothing, summed_elsewhere, unchanged

AXIS = "data"
OPTIONS = None
SPLITS = ()
layout = splits_nothing
used_layout = as_stored
check = no_problems
begin = unchanged
reduce = summed_elsewhere


def update_layout(parameter: Parameter, placed: TensorLayout, plan: MeshPlan) -> tuple[TensorLayout, str]:
    """Returns the layout of a gradient and the optimizer's state: the parameter's layout, also split over `data`.

    Args:
        parameter: The parameter.
        placed: The stored layout.
        plan: The plan of the mesh.
    """
    if plan.zero == 0:
        return placed, ""
    if parameter.bytes_on_device(placed) < plan.configs["data"].floor_bytes or AXIS in placed.used_axes:
        return placed, ""
    found = split_further(placed, parameter.shape, plan.mesh, AXIS, first=int(parameter.stacked))
    return (found[0], f"zero: dim {found[1]} over data") if found else (placed, "")


def finish(gradients: Any, plan: ShardingPlan) -> Any:
    """In stage 1, sums the gradients of an entire step over `data` and keeps this device's shards.

    Gradients that stay whole remain partial sums.
    """
    if plan.zero != 1:
        return gradients
    reduce_dtype = plan.options.precision.reduce

    def scatter(gradient: Array, layout: TensorLayout, update: TensorLayout) -> Array:
        dim = _scattered_dim(layout, update)
        if dim is None:
            return gradient
        wide = gradient.astype(reduce_dtype)
        summed = keep_split(lax.psum_scatter, wide, AXIS, layout, dim, scatter_dimension=dim, tiled=True)
        return summed.astype(gradient.dtype)

    return jax.tree.map(scatter, gradients, plan.table.layouts, plan.update_table.layouts)


def gradient_carriers(params: Any, layouts: Any, update_layouts: Any) -> Any:
    """Returns the differentiated variables of stage 2: for each parameter, a shard in the layout of the update.

    Only the gradient of such a carrier is used (`fsdp.attach` scatters into it). Its value is never read, so it is
    zero. A parameter that has the same layout in the update is its own carrier.
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
    dims = range(len(update.axes))
    return next((dim for dim in dims if AXIS in update.axes_of_dim(dim) and AXIS not in layout.axes_of_dim(dim)), None)


def cost(plan: ShardingPlan, counts: StepCounts, platform: str) -> list[Collective]:
    """Returns the gathers of updated parameters and, in stage 1, the reduce-scatters; FSDP counts those of stage 2."""
    width = wire_bytes(plan.options.precision.reduce, platform)
    scattered = _scattered(plan, without=plan.frozen) if plan.zero == 1 else []
    scatters = [Collective("reduce-scatter", (AXIS,), 1, elements * width) for _, elements in scattered]
    return gathers(plan, platform) + scatters


def gathers(plan: ShardingPlan, platform: str) -> list[Collective]:
    """Returns the gathers of updated parameters that XLA adds to the update."""
    return [
        Collective("all-gather", (AXIS,), 1, elements * wire_bytes(dtype, platform))
        for dtype, elements in _scattered(plan)
    ]


def _scattered(plan: ShardingPlan, without: Collection[str] = ()) -> list[tuple[Any, int]]:
    """Returns the stored dtype and the elements per device of each parameter whose update is split further."""
    rows = zip(plan.table.rows, plan.update_table.rows, strict=True)
    return [
        (row.dtype, row.elements_per_device)
        for row, target in rows
        if _scattered_dim(row.layout, target.layout) is not None and row.path not in without
    ]
