"""Fully sharded data parallel (ZeRO-3): parameters, gradients and optimizer state live in shards.

Use it where the state does not fit on one device. It takes any model. Keep the axis inside a host where the network
between hosts is slow, with `data` between hosts; give devices to `tensor` or `context` where each would get less than
a row.

Syntax, for a product `x W` with rows B and parameters both split over the axis `fsdp` of size N:

    forward    W[D, F] = all-gather over fsdp of W[D_fsdp, F]                     in the compute dtype
               Out[B_fsdp, F] = In[B_fsdp, D] . W[D, F]                           W is dropped again
    backward   W[D, F] = all-gather over fsdp of W[D_fsdp, F]                     once more, in `jax.checkpoint`
               dIn[B_fsdp, D] = dOut[B_fsdp, F] . W[D, F]
               dW[D_fsdp, F] = reduce-scatter over fsdp of In[B_fsdp, D] . dOut[B_fsdp, F]     in the reduce dtype
    update     on the shards alone                                                no communication

1. A parameter is stored split along one dim. Just before its block runs, each device casts its shard to the compute
   dtype and gathers the others': 2-byte weights cross the network where compute is bfloat16.
2. The gathered copy is not kept. `jax.checkpoint` gathers again when backward reaches the block: what a gradient is
   made of (`blocks/read_again.py`). A bias that was only added is not, nor a frozen matrix whose merged copy is kept.
3. The gradient of a gather is a reduce-scatter. It is written out in `attach`, because autodiff's own would sum in
   the compute dtype; this one sums in the reduce dtype, and each device receives its shard of the sum.
4. Parameters smaller than a floor stay whole, since a gather costs its latency however little it moves, and so do
   those of which N divides no dim. Their gradients are summed with the loss in the one all-reduce of `data.py`. If no
   parameter reaches the floor, there is none.
5. The embedding and the head are gathered once a step and kept through all its microbatches; only their gradients are
   scattered once for each. A model without blocks is treated alike: write it as embed / block / head to drop more.

With `data` beside it this is HSDP: each group of `fsdp` devices holds one copy, and the summed shards of gradients are
summed once more over `data`, 1 / N of the bytes, after all microbatches.

Bytes a step, for each sharded parameter of a block with P elements: forward and backward gathers P x compute width
each, reduce-scatter P x reduce width; a ring moves (N - 1) / N of that in and out of a device. Each microbatch repeats
it. Outside the blocks: one gather a step, one reduce-scatter a microbatch. On the critical path unless the compiler
starts the next gather early. Compute-bound while the tokens of one device exceed C / W (FLOP/s over bytes/s), as for
data parallelism with 1.5 times its bytes.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.3;
Zhao et al. 2023, "PyTorch FSDP", sections 3.2 and 3.3.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..layouts.paths import in_blocks
from ..layouts.split_dim import split_further
from ..layouts.tensor_layout import TensorLayout
from ..mesh.options import check_options
from .collectives import Collective, StepCounts, wire_bytes
from .plan import MeshPlan, Parameter, ShardingPlan, as_stored, splits_nothing, summed_elsewhere, unchanged
from .precision import Precision, cast_float

AXIS = "fsdp"
DIVIDES_NO_DIM = "divides no dim"
"""Ends the reason of a parameter that stays whole because N divides none of its dims."""


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """Options of the strategy `fsdp`."""

    size: int = 1
    """Devices that hold one copy of the state between them; rows of a batch are split over them too; -1 = the rest."""
    floor_bytes: int = 16384
    """Parameters of fewer bytes than this (in one block, where blocks are stacked) stay whole; dropped if all would."""
    keep: Literal["block", "step"] = "block"
    """How long gathered blocks are kept: while one runs (gathered again in backward), or all for the whole step."""
    prefetch: int = 0
    """Blocks gathered ahead of the one that runs, 0 or 1: 1 hides the gather, and holds one more block."""

    def __post_init__(self) -> None:
        check_options(AXIS, self, _option_problems(self))


def _option_problems(config: FSDPConfig) -> Iterator[str]:
    if config.floor_bytes < 0:
        yield f"strategy.fsdp.floor_bytes={config.floor_bytes} must be at least 0 bytes: 0 splits every parameter."
    if config.prefetch not in (0, 1):
        yield f"strategy.fsdp.prefetch={config.prefetch}: a block gathers 0 or 1 blocks ahead."
    if config.keep == "step" and config.prefetch:
        yield "strategy.fsdp.prefetch has no use with keep: step, which gathers before the first block."


OPTIONS = FSDPConfig
SPLITS = ("rows", "parameters")
update_layout = splits_nothing
used_layout = as_stored
begin = finish = unchanged
reduce = summed_elsewhere


def layout(parameter: Parameter, placed: TensorLayout, plan: MeshPlan) -> tuple[TensorLayout, str]:
    """Where one parameter lives: split along its first dim that N divides, or whole (see `split_further`).

    Dim 0 of stacked blocks counts the blocks: it is never split, and the floor applies to one block.

    Args:
        parameter: The parameter.
        placed: How other strategies split it already.
        plan: Which axis does what.

    Returns:
        The layout and the reason, as the layout table shows it.
    """
    config, mesh, shape = plan.configs.get(AXIS), plan.mesh, parameter.shape
    if config is None or mesh.axis_size(AXIS) == 1:
        return placed, ""
    first = int(parameter.stacked)
    parts = prod(placed.parts_of_dim(dim) for dim in range(first, len(shape)))
    num_bytes = prod(shape[first:]) * jnp.dtype(parameter.dtype).itemsize // parts
    if num_bytes < config.floor_bytes:
        return placed, f"fsdp: whole, under the floor of {config.floor_bytes:,} B"
    found = split_further(placed, shape, mesh, AXIS, first=first)
    if found is None:
        return placed, f"fsdp: whole, {mesh.axis_size(AXIS)} {DIVIDES_NO_DIM}"
    return found[0], f"fsdp: dim {found[1]}"


def check(plan: ShardingPlan) -> list[str]:
    """Says where there are no blocks to gather ahead."""
    if not plan.in_force(AXIS, "prefetch", 0) or plan.num_blocks is not None:
        return []
    return [
        f"strategy.fsdp.prefetch=1: model {plan.model_name!r} is one function and has no blocks to gather one by one. "
        "Set strategy.fsdp.prefetch to 0, or write it as a BlockModel (embed, block, head), which keeps no state."
    ]


def gather(params: Any, layouts: Any, axes: tuple[str, ...], precision: Precision) -> Any:
    """Casts parameters to the compute dtype and makes the sharded ones whole. No gradient flows: see `attach`.

    Args:
        params: Per-device parameters inside `shard_map`, varying over the mesh.
        layouts: Their `TensorLayout`s, a pytree of the same structure.
        axes: The mesh axes that are gathered over.
        precision: The compute dtype.

    Returns:
        Whole parameters in the compute dtype, varying over the mesh.
    """

    def collect(shard: Array, layout: TensorLayout) -> Array:
        whole = cast_float(lax.stop_gradient(shard), precision.compute)
        for dim, names in _gathered_dims(layout, axes):
            whole = lax.all_gather(whole, names, axis=dim, tiled=True)
        return whole

    return jax.tree.map(collect, params, layouts)


def attach(params: Any, whole: Any, layouts: Any, axes: tuple[str, ...], precision: Precision) -> Any:
    """Gives gathered parameters their gradient: what is computed with `whole` flows back to the shards of `params`.

    Args:
        params: Per-device parameters, as given to `gather`; None in place of those that do not train.
        whole: What `gather` made of all of them.
        layouts: The parameters' `TensorLayout`s.
        axes: The mesh axes that are gathered over.
        precision: The dtype of the reduce-scatter, and the parameters' own.

    Returns:
        `whole`; its gradient is reduce-scattered in the reduce dtype along every gathered dim. A parameter that is
        whole on every device is only cast, and differentiated as usual.
    """

    def connect(value: Array, shard: Array | None, layout: TensorLayout) -> Array:
        if shard is None:
            return value
        dims = _gathered_dims(layout, axes)
        return _attach(shard, value, dims, precision) if dims else cast_float(shard, precision.compute)

    return jax.tree.map(connect, whole, params, layouts)


def scatter(gradients: Any, layouts: Any, axes: tuple[str, ...], precision: Precision) -> Any:
    """What `attach` does to gradients, for a backward pass that is written out: reduce-scatters them to their shards.

    Args:
        gradients: Per-device gradients of whole parameters; None in place of those that do not train.
        layouts: The `TensorLayout`s of their shards.
        axes: The mesh axes that were gathered over.
        precision: The dtype of the reduce-scatter, and the parameters' own.
    """

    def one(layout: TensorLayout, leaf: Array | None) -> Array | None:
        return None if leaf is None else _scatter(leaf, _gathered_dims(layout, axes), precision)

    return jax.tree.map(one, layouts, gradients)


_GatheredDims: TypeAlias = tuple[tuple[int, tuple[str, ...]], ...]


def _gathered_dims(layout: TensorLayout, axes: tuple[str, ...]) -> _GatheredDims:
    """The dims of a parameter that are split over axes to gather over, each with those of them."""
    dims = [(dim, tuple(axis for axis in layout.axes_of_dim(dim) if axis in axes)) for dim in range(len(layout.axes))]
    return tuple((dim, names) for dim, names in dims if names)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _attach(shard: Array, whole: Array, dims: _GatheredDims, precision: Precision) -> Array:
    return whole


def _attach_forward(shard: Array, whole: Array, dims: _GatheredDims, precision: Precision) -> tuple[Array, None]:
    return whole, None


def _attach_backward(dims: _GatheredDims, precision: Precision, _: None, gradient: Array) -> tuple[Array, None]:
    return _scatter(gradient, dims, precision), None


def _scatter(gradient: Array, dims: _GatheredDims, precision: Precision) -> Array:
    for dim, axes in reversed(dims):
        summed = cast_float(gradient, precision.reduce)
        gradient = lax.psum_scatter(summed, axes, scatter_dimension=dim, tiled=True)
    return gradient.astype(precision.params)


_attach.defvjp(_attach_forward, _attach_backward)


def cost(plan: ShardingPlan, counts: StepCounts, platform: str) -> list[Collective]:
    """The gathers and reduce-scatters of one step, one for each dim that is split over axes to gather over.

    Blocks are gathered again for each call that reads them, unless they are kept for the step; every gradient that
    there is, is scattered.
    """
    axes, precision, calls = plan.gather_axes, plan.options.precision, counts.calls
    lines = []
    for row, gradient in zip(plan.used_table.rows, plan.gradient_table.rows, strict=True):
        group = row.path.split("/")[0]
        in_block = calls.rows > 0 and in_blocks(row.path)
        gathers, stack = (1, calls.rows if in_block else 1)
        if in_block and not plan.keeps_blocks:
            gathers = calls.block + calls.block_again + calls.block_backward - counts.unread.get(row.path, 0)
            stack = 1
        scatters = calls.block_weight if in_block else calls.group_gradients.get(group, calls.others)
        scatters = 0 if row.path in plan.frozen else scatters
        computed, summed = (
            wire_bytes(_dtype(row.dtype, dtype), platform) for dtype in (precision.compute, precision.reduce)
        )
        for names, elements in _gathered_sizes(row.layout, row.shape, axes, first=int(in_block)):
            lines.append(Collective("all-gather", names, gathers, gathers * stack * elements * computed))
        for names, elements in (
            _gathered_sizes(gradient.layout, row.shape, axes, first=int(in_block)) if scatters else ()
        ):
            lines.append(Collective("reduce-scatter", names, scatters, scatters * elements * summed))
    return lines


def _gathered_sizes(
    layout: TensorLayout, shape: tuple[int, ...], axes: tuple[str, ...], *, first: int
) -> list[tuple[tuple[str, ...], int]]:
    """The axes of each gathered dim and the elements (of one block) after its gather: before its scatter."""
    dims = _gathered_dims(layout, axes)
    parts = {dim: layout.parts_of_dim(dim) for dim in range(first, len(shape))}
    sizes = []
    for dim, names in dims:
        parts[dim] //= prod(layout.mesh.axis_size(name) for name in names)
        in_mesh_order = tuple(axis for axis in layout.mesh.axis_names if axis in names)
        sizes.append((in_mesh_order, prod(shape[first:]) // prod(parts.values())))
    return sizes


def _dtype(stored: Any, target: str) -> Any:
    return target if jnp.issubdtype(stored, jnp.floating) else stored
