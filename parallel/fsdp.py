"""Fully sharded data parallel (ZeRO-3): parameters, gradients and optimizer state live in shards.

Syntax, for a product `x W` with rows B and parameters both split over the axis `fsdp` of size N:

    forward    W[D, F] = all-gather over fsdp of W[D_fsdp, F]                     in the compute dtype
               Out[B_fsdp, F] = In[B_fsdp, D] . W[D, F]                           W is dropped again
    backward   W[D, F] = all-gather over fsdp of W[D_fsdp, F]                     once more, in `jax.checkpoint`
               dIn[B_fsdp, D] = dOut[B_fsdp, F] . W[D, F]
               dW[D_fsdp, F] = reduce-scatter over fsdp of In[B_fsdp, D] . dOut[B_fsdp, F]     in the reduce dtype
    update     on the shards alone                                                no communication

1. A parameter is stored split along one dim. Just before its block runs, each device casts its shard to the compute
   dtype and gathers the others': 2-byte weights cross the network where compute is bfloat16.
2. The gathered copy is not kept. `jax.checkpoint` gathers again when backward reaches the block.
3. The gradient of a gather is a reduce-scatter. It is written out below, because autodiff's own would sum in the
   compute dtype; this one sums in the reduce dtype, and each device receives its shard of the sum.
4. Parameters smaller than a floor stay whole, since a gather costs its latency however little it moves. Their gradients
   are summed with the loss in the one all-reduce of `data.py`.
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

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct, lax

from ..layouts.table import LayoutTable
from ..layouts.tensor_layout import TensorLayout
from ..mesh.device_mesh import DeviceMesh
from .collectives import Collective, wire_bytes
from .precision import Precision, cast_float

AXIS = "fsdp"


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """Options of the strategy `fsdp`."""

    size: int = 1
    """Devices that hold one copy of the state between them; rows of a batch are split over them too; -1 = the rest."""
    floor_bytes: int = 16384
    """Parameters of fewer bytes than this (in one block, where blocks are stacked) stay whole on every device."""


def layout(
    config: FSDPConfig, mesh: DeviceMesh, leaf: ShapeDtypeStruct, *, stacked: bool, on_indivisible: str
) -> tuple[TensorLayout, str]:
    """Where one parameter lives: split along its first dim that N divides, or whole.

    The first dim, not the largest: shards of the leading dim lie one after the other in memory, so gathering them needs
    no transpose.

    Args:
        config: The strategy's options.
        mesh: The mesh; its axis `fsdp` has size N.
        leaf: The global shape and dtype of the parameter.
        stacked: Whether dim 0 counts blocks; it is never split, and the floor applies to one block.
        on_indivisible: `replicate` leaves a parameter over the floor whole where N divides none of its dims; otherwise
            its first candidate dim is named, and resolving the layouts reports the arithmetic.

    Returns:
        The layout and the reason, as the layout table shows it.
    """
    size = mesh.axis_size(AXIS)
    first = 1 if stacked else 0
    whole = TensorLayout([None] * len(leaf.shape), mesh)
    num_bytes = prod(leaf.shape[first:]) * leaf.dtype.itemsize
    if size == 1 or len(leaf.shape) == first or num_bytes < config.floor_bytes:
        return whole, f"fsdp: whole, under the floor of {config.floor_bytes:,} B"
    divisible = [dim for dim in range(first, len(leaf.shape)) if leaf.shape[dim] % size == 0]
    if not divisible and on_indivisible == "replicate":
        return whole, f"fsdp: whole, {size} divides no dim"
    dim = divisible[0] if divisible else first
    return TensorLayout([AXIS if d == dim else None for d in range(len(leaf.shape))], mesh), f"fsdp: dim {dim}"


def gather(params: Any, layouts: Any, batch_axes: tuple[str, ...], precision: Precision) -> Any:
    """Casts parameters to the compute dtype and makes the sharded ones whole. No gradient flows: see `attach`.

    Args:
        params: Per-device parameters inside `shard_map`, varying over the batch axes.
        layouts: Their `TensorLayout`s, a pytree of the same structure.
        batch_axes: Mesh axes over which rows are split; a dim laid out over one of them is gathered.
        precision: The compute dtype.

    Returns:
        Whole parameters in the compute dtype, varying over the batch axes.
    """

    def collect(shard: Array, layout: TensorLayout) -> Array:
        whole = cast_float(lax.stop_gradient(shard), precision.compute)
        for dim, axes in _gathered_dims(layout, batch_axes):
            whole = lax.all_gather(whole, axes, axis=dim, tiled=True)
        return whole

    return jax.tree.map(collect, params, layouts)


def attach(params: Any, whole: Any, layouts: Any, batch_axes: tuple[str, ...], precision: Precision) -> Any:
    """Gives gathered parameters their gradient: what is computed with `whole` flows back to the shards of `params`.

    Args:
        params: Per-device parameters, as given to `gather`.
        whole: What `gather` made of them.
        layouts: The parameters' `TensorLayout`s.
        batch_axes: Mesh axes over which rows are split.
        precision: The dtype of the reduce-scatter, and the parameters' own.

    Returns:
        `whole`; its gradient is reduce-scattered in the reduce dtype along every gathered dim. A parameter that is
        whole on every device is only cast, and differentiated as usual.
    """

    def connect(shard: Array, value: Array, layout: TensorLayout) -> Array:
        dims = _gathered_dims(layout, batch_axes)
        return _attach(shard, value, dims, precision) if dims else cast_float(shard, precision.compute)

    return jax.tree.map(connect, params, whole, layouts)


_GatheredDims: TypeAlias = tuple[tuple[int, tuple[str, ...]], ...]


def _gathered_dims(layout: TensorLayout, batch_axes: tuple[str, ...]) -> _GatheredDims:
    """The dims of a parameter that are split over batch axes, each with those axes."""
    dims = [(dim, _kept(layout.axes_of_dim(dim), batch_axes)) for dim in range(len(layout.axes))]
    return tuple((dim, axes) for dim, axes in dims if axes)


def _kept(axes: tuple[str, ...], batch_axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis in batch_axes)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _attach(shard: Array, whole: Array, dims: _GatheredDims, precision: Precision) -> Array:
    return whole


def _attach_forward(shard: Array, whole: Array, dims: _GatheredDims, precision: Precision) -> tuple[Array, None]:
    return whole, None


def _attach_backward(dims: _GatheredDims, precision: Precision, _: None, gradient: Array) -> tuple[Array, None]:
    for dim, axes in reversed(dims):
        summed = cast_float(gradient, precision.reduce)
        gradient = lax.psum_scatter(summed, axes, scatter_dimension=dim, tiled=True)
    return gradient.astype(precision.params), None


_attach.defvjp(_attach_forward, _attach_backward)


def cost(
    table: LayoutTable,
    batch_axes: tuple[str, ...],
    precision: Precision,
    *,
    num_blocks: int,
    microbatches: int,
    platform: str,
) -> list[Collective]:
    """The gathers and reduce-scatters of one step.

    Args:
        table: The parameters' layouts.
        batch_axes: Mesh axes over which rows are split.
        precision: The compute and reduce dtypes.
        num_blocks: Blocks stacked under "blocks"; 0 for a model without blocks.
        microbatches: Gradient accumulation: blocks are gathered again for each, and every gradient scattered.
        platform: Where the step runs; it decides the bytes of 16-bit numbers, see `wire_bytes`.

    Returns:
        Unmerged lines, two for each sharded parameter.
    """
    lines = []
    for row in table.rows:
        axes = _kept(row.layout.used_axes, batch_axes)
        if not axes:
            continue
        in_block = num_blocks > 0 and row.path.split("/")[0] == "blocks"
        gathers = 2 * num_blocks * microbatches if in_block else 1
        scatters = (num_blocks if in_block else 1) * microbatches
        elements = prod(row.shape[1:] if in_block else row.shape) // _other_shards(row.layout, batch_axes)
        gathered = elements * wire_bytes(_dtype(row.dtype, precision.compute), platform)
        scattered = elements * wire_bytes(_dtype(row.dtype, precision.reduce), platform)
        lines.append(Collective("all-gather", axes, gathers, gathers * gathered))
        lines.append(Collective("reduce-scatter", axes, scatters, scatters * scattered))
    return lines


def _other_shards(layout: TensorLayout, batch_axes: tuple[str, ...]) -> int:
    """Into how many pieces axes that are not gathered (left to XLA) cut the parameter."""
    mesh = layout.device_mesh
    assert mesh is not None
    return prod(mesh.axis_size(axis) for axis in layout.used_axes if axis not in batch_axes)


def _dtype(stored: Any, target: str) -> Any:
    return target if jnp.issubdtype(stored, jnp.floating) else stored
