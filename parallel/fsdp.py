"""Fully sharded data parallel (ZeRO-3): parameters, gradients and optimizer state are stored in shards.

Use it if the state does not fit on one device. It works with any model. If the network between hosts is slow, keep the
axis inside a host, with `data` between hosts. If a device would get less than one row, use `tensor` or `context` too.

Syntax, for a product `x W` with rows B and parameters both split over the axis `fsdp` of size N:

    forward    W[D, F] = all-gather over fsdp of W[D_fsdp, F]                     in the compute dtype
               Out[B_fsdp, F] = In[B_fsdp, D] . W[D, F]                           W is dropped
    backward   W[D, F] = all-gather over fsdp of W[D_fsdp, F]                     again, in `jax.checkpoint`
               dIn[B_fsdp, D] = dOut[B_fsdp, F] . W[D, F]
               dW[D_fsdp, F] = reduce-scatter over fsdp of In[B_fsdp, D] . dOut[B_fsdp, F]     in the reduce dtype
    update     on the shards alone                                                no communication

1. A parameter is stored split along one dim. Just before its block runs, each device casts its shard to the compute
   dtype and gathers the other shards. With bfloat16 compute, the network therefore carries 2-byte weights.
2. The gathered copy is dropped after use. When backward reaches the block, `jax.checkpoint` gathers again the
   parameters that some gradient depends on (`blocks/backward_gathers.py`). It does not gather a bias that is only
   added, or a frozen matrix if its merged copy is kept.
3. The gradient of a gather is a reduce-scatter. `attach` defines it explicitly, because the one from autodiff would sum
   in the compute dtype. This one sums in the reduce dtype, and each device receives its shard of the sum. On GPUs, it
   may send the compute dtype (`exchanges`).
4. Parameters smaller than a floor stay whole, because a gather has a latency that does not depend on its size.
   Parameters without a dim that N divides stay whole too. Their gradients are summed with the loss in the one
   all-reduce of `data.py`. If no parameter reaches the floor, no floor applies.
5. The embedding and the head are gathered once per step and kept for all its microbatches; only their gradients are
   reduce-scattered for each microbatch. A model without blocks is handled in the same way. Write it as embed / block /
   head to hold fewer gathered parameters at a time.

Together with `data` this is HSDP: each group of `fsdp` devices holds one copy of the state. After all microbatches, the
summed shards of the gradients are summed again over `data`, which moves 1 / N of the bytes.

Together with an axis that is left to XLA (`tensor` by layout rules), each device gathers and scatters only its part of
a parameter over that axis (`collectives.keep_split`). If both split the same dim, XLA gathers over both.

Bytes per step, for each sharded parameter of a block with P elements: the gathers in forward and in backward move
P x compute width each, the reduce-scatter P x reduce width. A ring moves (N - 1) / N of that into and out of a device.
Each microbatch repeats all three. Outside the blocks, there is one gather per step and one reduce-scatter per
microbatch. All are on the critical path unless the compiler starts the next gather early. The step is compute-bound if
the tokens per device exceed C / W (FLOP/s over bytes/s), as for data parallelism with 1.5 times its bytes.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.3;
Zhao et al. 2023, "PyTorch FSDP", sections 3.2 and 3.3.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from annotated_types import Ge, Le
from jax import Array, lax

from ..layouts.paths import in_blocks
from ..layouts.tensor_layout import TensorLayout, split_further
from ..mesh.device_mesh import DeviceMesh
from .collectives import (
    Collective,
    StepCounts,
    exchange_sum,
    keep_split,
    strategy_scope,
    varying_zeros,
    wire_bytes,
)
from .options import Precision, cast_float, check_options
from .plan import MeshPlan, Parameter, ShardingPlan, as_stored, splits_nothing, summed_elsewhere, unchanged
from .xla.platform import crosses_hosts, overlaps

AXIS = "fsdp"
DIVIDES_NO_DIM = "divides no dim"
"""The end of the reason for a parameter that stays whole because N does not divide any of its dims."""


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """Options of the strategy `fsdp`."""

    size: int = 1
    """Devices over which one copy of the state is split; rows of a batch are split over them too; -1 = the rest."""
    floor_bytes: Annotated[int, Ge(0)] = 16384
    """Parameters with fewer bytes (in one block, if blocks are stacked) stay whole; ignored if all parameters would."""
    keep: Literal["block", "step"] = "block"
    """Lifetime of gathered blocks: `block` keeps one while it runs, and gathers it again in backward; `step` keeps all
    for the entire step."""
    prefetch: Annotated[int, Ge(0), Le(1)] = 0
    """Blocks gathered in advance, 0 or 1: 1 hides the gather, but needs memory for one more block."""

    def __post_init__(self) -> None:
        useless = self.keep == "step" and self.prefetch == 1
        problem = "strategy.fsdp.prefetch has an effect only with keep: block; keep: step gathers all at the start."
        check_options(AXIS, self, [problem] if useless else [])


OPTIONS = FSDPConfig
SPLITS = ("rows", "parameters")
update_layout = splits_nothing
used_layout = as_stored
begin = finish = unchanged
reduce = summed_elsewhere


def layout(parameter: Parameter, placed: TensorLayout, plan: MeshPlan) -> tuple[TensorLayout, str]:
    """Returns the layout of one parameter: split along its first dim that N divides, or whole (see `split_further`).

    Dim 0 of stacked blocks counts the blocks: it is never split, and the floor applies to one block.

    Args:
        parameter: The parameter.
        placed: The layout given by other strategies.
        plan: The plan of the mesh.

    Returns:
        The layout and the reason, as the layout table shows it.
    """
    config, mesh = plan.configs.get(AXIS), plan.mesh
    if config is None or mesh.axis_size(AXIS) == 1:
        return placed, ""
    if parameter.bytes_on_device(placed) < config.floor_bytes:
        return placed, f"fsdp: whole, under the floor of {config.floor_bytes:,} B"
    found = split_further(placed, parameter.shape, mesh, AXIS, first=int(parameter.stacked))
    if found is None:
        return placed, f"fsdp: whole, {mesh.axis_size(AXIS)} {DIVIDES_NO_DIM}"
    return found[0], f"fsdp: dim {found[1]}"


def check(plan: ShardingPlan) -> list[str]:
    """Rejects prefetching for a model without blocks."""
    if not plan.in_force(AXIS, "prefetch", 0) or plan.num_blocks is not None:
        return []
    return [
        f"strategy.fsdp.prefetch=1: model {plan.model_name!r} is one function without blocks, which could be gathered "
        "one by one. Set strategy.fsdp.prefetch to 0, or write it as a BlockModel (embed, block, head) without a state."
    ]


def gather(params: Any, layouts: Any, axes: tuple[str, ...], precision: Precision) -> Any:
    """Casts parameters to the compute dtype and gathers the sharded ones. Not differentiable: see `attach`.

    Args:
        params: The per-device parameters inside `shard_map`, varying over the mesh.
        layouts: Their `TensorLayout`s, a pytree of the same structure.
        axes: The mesh axes to gather over.
        precision: The compute dtype.

    Returns:
        Whole parameters in the compute dtype, varying over the mesh.
    """

    def collect(shard: Array, layout: TensorLayout) -> Array:
        whole = cast_float(lax.stop_gradient(shard), precision.compute)
        for dim, names in _gathered_dims(layout, axes):
            with strategy_scope():
                whole = keep_split(lax.all_gather, whole, names, layout, dim, axis=dim, tiled=True)
        return whole

    return jax.tree.map(collect, params, layouts)


def attach(params: Any, whole: Any, layouts: Any, axes: tuple[str, ...], precision: Precision) -> Any:
    """Connects gathered parameters to their shards, so that gradients of `whole` flow back to `params`.

    Args:
        params: Per-device parameters, as given to `gather`, or `whole_carriers`; None in place of frozen ones.
        whole: The result of `gather` for all of them.
        layouts: The parameters' `TensorLayout`s.
        axes: The mesh axes to gather over.
        precision: The dtypes of the reduce-scatter and of the parameters.

    Returns:
        `whole`, with gradients that are reduce-scattered in the reduce dtype along every gathered dim, except those of
        whole carriers. A parameter that is whole on every device is only cast; autodiff differentiates it.
    """

    def connect(value: Array, shard: Array | None, layout: TensorLayout) -> Array:
        if shard is None:
            return value
        if not _gathered_dims(layout, axes):
            return cast_float(shard, precision.compute)
        scattered = axes if shard.shape != value.shape else ()
        return _attach(shard, value, partial(_scatter, layout=layout, axes=scattered, precision=precision))

    return jax.tree.map(connect, whole, params, layouts)


def whole_carriers(params: Any, layouts: Any, axes: tuple[str, ...]) -> Any:
    """Returns the variables of a backward pass whose gradients stay whole: zeros in place of each gathered parameter.

    Only the gradient of such a carrier is used, never its value. A parameter that is whole is its own carrier.

    Args:
        params: The per-device parameters; None in place of frozen ones.
        layouts: Their `TensorLayout`s, of the trained ones only.
        axes: The mesh axes that are gathered over.
    """

    def carrier(shard: Array, layout: TensorLayout) -> Array:
        dims, shape = _gathered_dims(layout, axes), list(shard.shape)
        for dim, names in dims:
            shape[dim] *= prod(layout.mesh.axis_size(name) for name in names)
        return varying_zeros(tuple(shape), shard.dtype, like=shard) if dims else shard

    return jax.tree.map(carrier, params, layouts)


def scatter(gradients: Any, layouts: Any, axes: tuple[str, ...], precision: Precision) -> Any:
    """Reduce-scatters gradients to their shards, as `attach` does, for an explicit backward pass.

    Args:
        gradients: The per-device gradients of whole parameters; None in place of frozen ones.
        layouts: The `TensorLayout`s of their shards.
        axes: The mesh axes of the gathers.
        precision: The dtypes of the reduce-scatter and of the parameters.
    """

    def one(layout: TensorLayout, leaf: Array | None) -> Array | None:
        return None if leaf is None else _scatter(leaf, layout, axes, precision)

    return jax.tree.map(one, layouts, gradients)


def _gathered_dims(layout: TensorLayout, axes: tuple[str, ...]) -> list[tuple[int, tuple[str, ...]]]:
    """Returns the dims of a parameter that are split over gathered axes, with the axes of each."""
    dims = [(dim, tuple(axis for axis in layout.axes_of_dim(dim) if axis in axes)) for dim in range(len(layout.axes))]
    return [(dim, names) for dim, names in dims if names]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attach(shard: Array, whole: Array, scatter: Callable[[Array], Array]) -> Array:
    return whole


def _scatter(gradient: Array, layout: TensorLayout, axes: tuple[str, ...], precision: Precision) -> Array:
    for dim, names in reversed(_gathered_dims(layout, axes)):
        narrow = exchanges(layout.mesh, names, gradient.dtype, precision.reduce)
        collective = partial(exchange_sum, dtype=precision.reduce) if narrow else lax.psum_scatter
        summed = gradient if narrow else cast_float(gradient, precision.reduce)
        with strategy_scope():
            gradient = keep_split(collective, summed, names, layout, dim, scatter_dimension=dim, tiled=True)
    return gradient.astype(precision.params)


def exchanges(mesh: DeviceMesh, axes: tuple[str, ...], dtype: Any, reduce_dtype: str) -> bool:
    """Returns whether a gradient is exchanged in its own dtype, and summed after that: on GPUs, between hosts.

    If several devices of a group share a host, a ring crosses the network once for all of them.
    """
    if not overlaps(str(mesh.devices.flat[0]).split(":")[0]):
        return False
    is_narrower = jnp.dtype(dtype).itemsize < jnp.dtype(reduce_dtype).itemsize
    return is_narrower and crosses_hosts(mesh, axes)


_attach.defvjp(lambda shard, whole, scatter: (whole, None), lambda scatter, _, gradient: (scatter(gradient), None))


def cost(plan: ShardingPlan, counts: StepCounts, platform: str) -> list[Collective]:
    """Returns the gathers and reduce-scatters of one step, one for each dim that is split over gathered axes.

    Blocks are gathered again for each call that reads them, unless they are kept for the step. Every gradient is
    scattered, unless a pipeline adds them up first.
    """
    axes, precision, calls = plan.gather_axes, plan.options.precision, counts.calls
    lines = []
    for row, gradient in zip(plan.used_table.rows, plan.gradient_table.rows, strict=True):
        in_block = calls.rows > 0 and in_blocks(row.path)
        gathers, stack = (1, calls.rows if in_block else 1)
        if in_block and not plan.keeps_blocks:
            gathers = calls.block + calls.block_again + calls.block_backward - counts.unread.get(row.path, 0)
            stack = 1
        scatters = calls.block_weight if in_block else calls.group_gradients.get(row.path.split("/")[0], calls.others)
        pieces = scatters
        if plan.scatters_once:
            scatters, pieces = plan.options.accumulate, plan.options.accumulate * (calls.rows if in_block else 1)
        if row.path in plan.frozen:
            scatters = pieces = 0
        computed = wire_bytes(_dtype(row.dtype, precision.compute), platform)
        summed = wire_bytes(_dtype(row.dtype, precision.reduce), platform)
        for names, elements in _gathered_sizes(row.layout, row.shape, axes, first=int(in_block)):
            lines.append(Collective("all-gather", names, gathers, gathers * stack * elements * computed))
        given = _dtype(row.dtype, precision.reduce if plan.scatters_once else precision.compute)
        for names, elements in reversed(_gathered_sizes(gradient.layout, row.shape, axes, first=int(in_block))):
            narrow = exchanges(plan.mesh, names, given, precision.reduce)
            kind, width = ("all-to-all", computed) if narrow else ("reduce-scatter", summed)
            lines.append(Collective(kind, names, scatters, pieces * elements * width))
            given = precision.reduce
    return lines


def _gathered_sizes(
    layout: TensorLayout, shape: tuple[int, ...], axes: tuple[str, ...], *, first: int
) -> list[tuple[tuple[str, ...], int]]:
    """Returns the axes of each gathered dim, and the elements (of one block) after its gather and before its
    scatter."""
    parts = {dim: layout.parts_of_dim(dim) for dim in range(first, len(shape))}
    sizes = []
    for dim, names in _gathered_dims(layout, axes):
        parts[dim] //= prod(layout.mesh.axis_size(name) for name in names)
        in_mesh_order = tuple(axis for axis in layout.mesh.axis_names if axis in names)
        sizes.append((in_mesh_order, prod(shape[first:]) // prod(parts.values())))
    return sizes


def _dtype(stored: Any, target: str) -> Any:
    return target if jnp.issubdtype(stored, jnp.floating) else stored
