"""Embedding and head split over the stages between steps: `strategy.pipe.embed_and_head: split`.

Every stage runs the same program, so each has room for the embedding and the head, whether it uses them or not. Where
they are large, all but a part of that room is needed only while a step runs:

    before    W[V, D] = all-gather over pipe of W[V_pipe, D]             in the parameters' dtype, once a step
    after     dW[V_pipe, D] = reduce-scatter over pipe of dW[V, D]       in the reduce dtype, once a step

Parameters, gradients after the step and the optimizer's state take 1 / S of the room. The two replace the all-reduce of
these gradients and move as much, if parameters are as wide as their gradients. The axis is the innermost of a dim, so
that FSDP gathers what comes out of the gather over pipe, and scatters before the scatter.

Source: Rajbhandari et al. 2020, "ZeRO", section 5.1, with stages for data.
"""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import jax
from jax import Array, lax

from ...layouts.table import LayoutTable
from ...layouts.tensor_layout import TensorLayout
from ..collectives import Collective, wire_bytes
from ..model import Params
from ..pipeline import AXIS
from ..plan import Layouts


def gather_embed_and_head(params: Params, layouts: Any) -> Params:
    """Makes what is outside the blocks whole along `pipe`.

    Args:
        params: Per-device parameters.
        layouts: Their `TensorLayout`s.
    """

    def gather(leaf: Array, dim: int) -> Array:
        return lax.all_gather(leaf, AXIS, axis=dim, tiled=True)

    return _over_pipe(gather, params, layouts)


def scatter_embed_and_head(gradients: Params, layouts: Any, reduce_dtype: str) -> Params:
    """Sums gradients of what is outside the blocks over the stages, each of which keeps its part.

    Args:
        gradients: Per-device gradients, whole along `pipe`, summed over all microbatches.
        layouts: The parameters' `TensorLayout`s.
        reduce_dtype: The dtype of the sums.
    """

    def scatter(leaf: Array, dim: int) -> Array:
        summed = lax.psum_scatter(leaf.astype(reduce_dtype), AXIS, scatter_dimension=dim, tiled=True)
        return summed.astype(leaf.dtype)

    return _over_pipe(scatter, gradients, layouts)


def _over_pipe(function: Callable[[Array, int], Array], tree: Params, layouts: Any) -> Params:
    def apply(leaf: Array, layout: TensorLayout) -> Array:
        dim = _dim(layout)
        return leaf if dim is None else function(leaf, dim)

    changed = {name: jax.tree.map(apply, group, layouts[name]) for name, group in tree.items() if name != "blocks"}
    return {**tree, **changed}


def _dim(layout: TensorLayout) -> int | None:
    dims = [dim for dim in range(len(layout.axes)) if AXIS in layout.axes_of_dim(dim)]
    return dims[0] if dims else None


def whole_along_pipe(table: LayoutTable) -> LayoutTable:
    """The layouts within a step: nothing outside the blocks is split over `pipe`."""

    def whole(layout: TensorLayout) -> TensorLayout:
        dims = [tuple(axis for axis in layout.axes_of_dim(dim) if axis != AXIS) for dim in range(len(layout.axes))]
        return TensorLayout([axes or None for axes in dims], layout.device_mesh)

    rows = [row if _in_blocks(row.path) else replace(row, layout=whole(row.layout)) for row in table.rows]
    return replace(table, rows=tuple(rows))


def check(layouts: Layouts) -> list[str]:
    """What this does not combine with."""
    split = any(_dim(row.layout) is not None for row in layouts.table.rows if not _in_blocks(row.path))
    if not split or layouts.zero != 2:
        return []
    return [
        "strategy.pipe.embed_and_head=split scatters gradients after backward, strategy.data.zero=2 within it: a dim "
        "would be split in two orders. Set strategy.data.zero to 1, or strategy.pipe.embed_and_head to whole."
    ]


def _in_blocks(path: str) -> bool:
    return path.split("/")[0] == "blocks"


def cost(table: LayoutTable, reduce_dtype: str, *, platform: str) -> list[Collective]:
    """A gather and a reduce-scatter for each parameter outside the blocks that is split over `pipe`.

    Args:
        table: The parameters' layouts.
        reduce_dtype: The dtype of the sums.
        platform: Where the step runs, see `wire_bytes`.
    """
    lines = []
    for row, within in zip(table.rows, whole_along_pipe(table).rows, strict=True):
        if not _in_blocks(row.path) and _dim(row.layout) is not None:
            elements = prod(within.layout.shard_shape(row.shape))
            lines.append(Collective("all-gather", (AXIS,), 1, elements * wire_bytes(row.dtype, platform)))
            lines.append(Collective("reduce-scatter", (AXIS,), 1, elements * wire_bytes(reduce_dtype, platform)))
    return lines
