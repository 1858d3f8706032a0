"""A toy strategy, the one file that a new one is: parameters stored in parts, and whole for a step.

Syntax, for a parameter W and rows B split over the axis `toy` of size N:

    before    W[D, F] = all-gather over toy of W[D_toy, F]               in the parameters' dtype, once a step
    after     dW[D_toy, F] = reduce-scatter over toy of dW[D, F]         in the reduce dtype, once a step
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax import Array, lax
from spmdkit.layouts.tensor_layout import TensorLayout, split_further
from spmdkit.parallel.collectives import Collective, StepCounts, wire_bytes
from spmdkit.parallel.options import check_options
from spmdkit.parallel.plan import MeshPlan, Parameter, ShardingPlan, splits_nothing, summed_elsewhere

AXIS = "toy"


@dataclass(frozen=True, kw_only=True)
class ToyConfig:
    """Options of the strategy `toy`."""

    size: int = 1
    """Devices over which rows and stored parameters are split."""

    def __post_init__(self) -> None:
        check_options(AXIS, self)


OPTIONS = ToyConfig
SPLITS = ("rows", "parameters")
update_layout = splits_nothing
reduce = summed_elsewhere


def layout(parameter: Parameter, placed: TensorLayout, plan: MeshPlan) -> tuple[TensorLayout, str]:
    """Splits the first dim that can be, of parameters with another one left for other strategies."""
    first = int(parameter.stacked)
    if plan.mesh_size(AXIS) == 1 or len(parameter.shape) < first + 2:
        return placed, ""
    found = split_further(placed, parameter.shape, plan.mesh, AXIS, first=first)
    return (found[0], f"toy: dim {found[1]}") if found else (placed, "")


def used_layout(path: str, layout: TensorLayout) -> TensorLayout:
    """Within a step nothing is split over the axis."""
    dims = [tuple(axis for axis in layout.axes_of_dim(dim) if axis != AXIS) for dim in range(len(layout.axes))]
    return TensorLayout([axes or None for axes in dims], layout.device_mesh) if _dim(layout) is not None else layout


def check(plan: ShardingPlan) -> list[str]:
    """Says where the axis is not the innermost of a dim: what is gathered first would be put together wrongly."""
    return [
        f"{row.path} has the layout {row.layout}, but strategy.toy is gathered first. Name toy last in this rule."
        for row in plan.table.rows
        for axes in map(row.layout.axes_of_dim, range(len(row.shape)))
        if AXIS in axes[:-1]
    ]


def cost(plan: ShardingPlan, counts: StepCounts, platform: str) -> list[Collective]:
    """A gather and a reduce-scatter of each parameter that is stored in parts."""
    lines, summed = [], plan.options.precision.reduce
    tables = (plan.table.rows, plan.used_table.rows, plan.gradient_table.rows)
    for row, used, gradient in zip(*tables, strict=True):
        if _dim(row.layout) is not None:
            whole, local = (prod(each.layout.shard_shape(row.shape)) for each in (used, gradient))
            lines.append(Collective("all-gather", (AXIS,), 1, whole * wire_bytes(row.dtype, platform)))
            lines.append(Collective("reduce-scatter", (AXIS,), 1, local * wire_bytes(summed, platform)))
    return lines


def begin(params: Any, plan: ShardingPlan) -> Any:
    """Makes parameters whole along the axis."""
    return _along(lambda leaf, dim: lax.all_gather(leaf, AXIS, axis=dim, tiled=True), params, plan)


def finish(gradients: Any, plan: ShardingPlan) -> Any:
    """Sums gradients over the axis; each device keeps its part."""

    def scatter(leaf: Array, dim: int) -> Array:
        summed = leaf.astype(plan.options.precision.reduce)
        return lax.psum_scatter(summed, AXIS, scatter_dimension=dim, tiled=True).astype(leaf.dtype)

    return _along(scatter, gradients, plan)


def _along(function: Callable[[Array, int], Array], tree: Any, plan: ShardingPlan) -> Any:
    def apply(leaf: Array, layout: TensorLayout) -> Array:
        dim = _dim(layout)
        return leaf if dim is None else function(leaf, dim)

    return jax.tree.map(apply, tree, plan.table.layouts)


def _dim(layout: TensorLayout) -> int | None:
    return next((dim for dim in range(len(layout.axes)) if AXIS in layout.axes_of_dim(dim)), None)
