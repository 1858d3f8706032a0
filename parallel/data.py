"""Data parallel: every device holds the whole model and its own rows of the batch; gradients are summed.

Use it if parameters, gradients and optimizer state all fit on one device. It communicates only one sum of the gradients
per step, late in the step. If the state is too large, shard it with `zero` or with the strategy `fsdp`.

Syntax, for a product `x W` with the batch B split over the axis `data` of size N:

    forward    Out[B_data, F] = In[B_data, D] . W[D, F]                           no communication
    backward   dW[D, F] {U_data} = In[B_data, D] . dOut[B_data, F]                a partial sum on each device
    update     dW[D, F] = all-reduce over data of dW[D, F] {U_data}               only the last is on the critical path

1. Before differentiation, parameters are typed as varying over the axes of the batch. Autodiff then leaves every
   gradient local, and nothing in the backward pass communicates.
2. The gradients of several microbatches are first summed locally, so a step has one reduction for any number of
   microbatches.
3. There is one all-reduce per bucket. A bucket is the set of gradients that still have to be summed over the same axes.
   Under data parallelism alone, the only bucket holds all gradients, together with the sum of the loss and its weight.
   Under FSDP, backward already sums the sharded gradients over `fsdp`. With `data`, these form a second bucket, summed
   over `data` alone. Without `data`, they are complete: only the sum of their squares, which the norm needs, joins the
   first bucket.
4. The sums are divided once, by the weight of the whole global batch.

Bytes: the size of the parameters in the reduce dtype, plus 8 for the loss and its weight. A ring all-reduce moves
2 (N - 1) / N of that into and out of each device. The step is compute-bound if the tokens per device B / N exceed
C / W, where C is a device's FLOP/s and W its network bandwidth in bytes/s (float32 gradients, 2-byte compute, and
communication that overlaps backward).

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", sections 3 and 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from annotated_types import Ge, Le, Lt
from jax import Array, lax

from ..layouts.paths import in_blocks
from ..layouts.table import LayoutRow
from ..layouts.tensor_layout import TensorLayout
from .collectives import Collective, StepCounts, strategy_scope, vary, wire_bytes
from .options import PositiveFloat32, check_options
from .plan import Reduced, ShardingPlan, as_stored, no_problems, splits_nothing, unchanged
from .xla.ordered_collectives import order_after
from .xla.platform import overlaps

AXIS = "data"
SCALARS = 2
"""The sum of the loss and its weight, which are reduced with the gradients and the model's metrics."""


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """Options of the strategy `data`."""

    size: int = 1
    """Devices over which the rows of a batch are split, each with a whole copy of the state; -1 = the rest."""
    zero: Annotated[int, Ge(0), Le(2)] = 0
    """ZeRO stage: 0 splits nothing over the axis, 1 the optimizer's state, 2 gradients too (see `zero.py`). Stage 3,
    parameters as well, is the strategy `fsdp`."""
    floor_bytes: Annotated[int, Ge(0)] = 16384
    """With `zero`, parameters of fewer bytes than this (in one block, on a device) are not split."""
    compress: Literal["none", "int8"] = "none"
    """Compression of gradients over the axis: `none` uses the reduce dtype, `int8` a quarter of the bytes (see
    `compression.py`)."""
    reduce: Literal["auto", "overlapped", "at_end"] = "auto"
    """Time at which gradients of blocks are summed: `at_end` once, after backward; `overlapped` block by block within
    backward, beside the products of the next block; `auto` = overlapped on GPUs, and otherwise at_end. Gradients that
    are accumulated, or that `zero`, `compress`, `local_steps`, a pipeline or `fsdp.prefetch` handles, are summed
    once."""
    local_steps: Annotated[int, Ge(0)] = 0
    """Steps that each group along the axis trains its own copy before the copies are averaged (DiLoCo, see
    `diloco.py`); 0 = groups train together."""
    outer_learning_rate: PositiveFloat32 = 0.7
    """With `local_steps`, the fraction of the distance that the shared parameters move towards the mean of the
    copies."""
    outer_momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    """With `local_steps`, the Nesterov momentum of that movement."""

    def __post_init__(self) -> None:
        chosen = {"zero": self.zero, "compress": self.compress, "local_steps": self.local_steps}
        given = [f"{name}={value}" for name, value in chosen.items() if value not in (0, "none")]
        problem = (
            f"strategy.data: {' and '.join(given)} do not combine: each decides alone what crosses the axis. Keep one; "
            "to split the state as well, give some of the devices to strategy.fsdp."
        )
        check_options(AXIS, self, [problem] if len(given) > 1 else [])


OPTIONS = DataParallelConfig
SPLITS = ("rows",)
layout = update_layout = splits_nothing
used_layout = as_stored
check = no_problems
begin = finish = unchanged


def reduces_in_backward(plan: ShardingPlan) -> bool:
    """Returns whether the gradients of blocks are summed block by block within backward, see `DataParallelConfig`."""
    when = plan.in_force(AXIS, "reduce", "at_end")
    if plan.zero or plan.local_steps or plan.compressed or plan.pipeline or plan.in_force("fsdp", "prefetch", 0):
        return False
    in_backward = when == "overlapped" or (when == "auto" and overlaps(plan.platform))
    return in_backward and plan.options.accumulate == 1 and plan.num_blocks is not None


def make_varying(params: Any, layouts: Any, axes: tuple[str, ...]) -> Any:
    """Types parameters as varying over the batch axes, so that their gradients stay local.

    Args:
        params: Per-device parameters inside `shard_map`.
        layouts: Their `TensorLayout`s, a pytree of the same structure.
        axes: The mesh axes over which devices have shares of the loss: those of the rows, and those inside the model.
    """

    return jax.tree.map(lambda leaf, layout: vary(leaf, axes_to_sum(layout, axes)), params, layouts)


def axes_to_sum(layout: TensorLayout, axes: Sequence[str]) -> tuple[str, ...]:
    """Returns the axes over which a gradient of this layout is a partial sum after backward."""
    return tuple(axis for axis in axes if axis not in layout.used_axes)


def reduce_gradients(
    gradients: Any, scalars: Sequence[Array], layouts: Any, axes: tuple[str, ...], reduce_dtype: str
) -> tuple[Any, list[Array]]:
    """Sums gradients and a few scalars over the mesh: one `psum` per bucket.

    Args:
        gradients: Local gradients in the layouts of their parameters; sharded ones are summed over their own axes.
        scalars: Other local sums: of the loss, of the weights.
        layouts: The parameters' `TensorLayout`s, a pytree of the gradients' structure.
        axes: The mesh axes over which devices have shares of the loss: those of the rows, and those inside the model.
        reduce_dtype: The dtype of the sums of gradients.

    Returns:
        Gradients in their own dtype, and the scalars, summed over all devices.
    """
    leaves, treedef = jax.tree.flatten(gradients)
    reduced, summed_scalars = list(leaves), list(scalars)
    for bucket, members in _buckets(treedef.flatten_up_to(layouts), axes).items():
        operands = [leaves[index].astype(reduce_dtype) for index in members]
        passengers = scalars if bucket == axes else ()
        with strategy_scope():
            summed = lax.psum([*operands, *passengers], bucket)
        for index, value in zip(members, summed, strict=False):
            reduced[index] = value.astype(leaves[index].dtype)
        if passengers:
            summed_scalars = summed[len(members) :]
    return jax.tree.unflatten(treedef, reduced), summed_scalars


def sum_in_backward(params: Any, layouts: Any, axes: tuple[str, ...], reduce_dtype: str) -> Any:
    """Types parameters as varying over the batch axes; backward sums their gradients, see `reduce_gradients`.

    In a loop over blocks, the sum of one block's gradients runs beside the products of the next one.
    """

    @jax.custom_vjp
    def run(params: Any) -> Any:
        return make_varying(params, layouts, axes)

    def backward(_: None, gradients: Any) -> tuple[Any]:
        return (reduce_gradients(gradients, (), layouts, axes, reduce_dtype)[0],)

    run.defvjp(lambda params: (run(params), None), backward)
    return run(params)


def _buckets(layouts: Sequence[TensorLayout], axes: tuple[str, ...]) -> dict[tuple[str, ...], list[int]]:
    """Returns the gradients, by number, that are summed together, by the axes to sum over.

    All axes always come first (for the loss), then the others in order of appearance.
    """
    found: dict[tuple[str, ...], list[int]] = {axes: []} if axes else {}
    for number, layout in enumerate(layouts):
        if lacking := axes_to_sum(layout, axes):
            found.setdefault(lacking, []).append(number)
    return found


def reduce(found: Reduced, plan: ShardingPlan) -> Reduced:
    """Sums gradients and scalars over all remaining axes, unless compression has."""
    if plan.compressed:
        return found
    gradients, scalars, summed = found.gradients, found.scalars, {}
    layouts, precision = plan.update_table.layouts, plan.options.precision
    if found.summed:
        summed = {name: gradients[name] for name in found.summed}
        gradients, layouts = (tree | {name: {} for name in summed} for tree in (gradients, layouts))
        gradients, scalars = order_after(summed, (gradients, scalars))  # else XLA:CPU merges some of their reductions
    reduced, scalars = reduce_gradients(gradients, scalars, layouts, plan.summed_axes, precision.reduce)
    return Reduced({**reduced, **summed} if summed else reduced, scalars, found.errors, found.scale)


def cost(plan: ShardingPlan, counts: StepCounts, platform: str) -> list[Collective]:
    """Returns the all-reduces of one step: one per bucket of gradients; the loss and its weight are in the first."""
    if plan.compressed:
        return []
    rows, axes, reduce_dtype = plan.trained.update_table.rows, plan.summed_axes, plan.options.precision.reduce
    width = wire_bytes(reduce_dtype, platform)
    complete = any(not axes_to_sum(row.layout, axes) for row in rows)  # their share of the norm is one more scalar
    scalars = (SCALARS + counts.metrics + complete) * scalar_width(reduce_dtype)
    in_backward = [row for row in rows if reduces_in_backward(plan) and in_blocks(row.path)]
    lines = _all_reduces([row for row in rows if row not in in_backward], axes, width, scalars)
    in_turns = _all_reduces(in_backward, axes, width, 0)  # together, those of all blocks
    return lines + [replace(line, count=plan.num_blocks) for line in in_turns]


def _all_reduces(rows: Sequence[LayoutRow], axes: tuple[str, ...], width: int, scalars: int) -> list[Collective]:
    """Returns one all-reduce per bucket; `scalars` are the bytes of the scalars in the first."""
    lines = []
    for bucket, members in _buckets([row.layout for row in rows], axes).items():
        elements = sum(rows[number].elements_per_device for number in members)
        size = width * elements + (scalars if bucket == axes else 0)
        if size:
            lines.append(Collective("all-reduce", bucket, 1, size))
    return lines


def scalar_width(reduce_dtype: str) -> int:
    """Returns the bytes of a loss or a weight: float32, or float64 if gradients are."""
    return max(4, jnp.dtype(reduce_dtype).itemsize)
