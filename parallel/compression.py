"""Compressed gradients: data parallelism's sums in 8 bits, with rounding errors added back in the next step.

Use it if the devices wait for the sum of the gradients over `data`, and the training should hardly change. Losses stay
close to the exact ones, which is not guaranteed with H local steps (`local_steps`).

Syntax, for the gradients G of one bucket on each of N devices, with errors E and F from the previous step:

    send       Q[R, 260] int8 = quantize(G[R, 256] + E)          E = G + E - Q    in blocks of 256 with one scale each
               Q[N, R / N, 260] = all-to-all of Q[R, 260]                         each device gets its rows from all
    sum        S[R / N, 256] = sum over N of Q                                    in float32
               P[R / N, 260] int8 = quantize(S + F)              F = S + F - P
    return     P[R, 260] = all-gather of P[R / N, 260]                            the sum, the same on all devices

1. As in `data.py`, a bucket is the set of gradients that still have to be summed over the same axes: over `data` alone
   if a gradient is split over all other axes, otherwise over `data` and others. Its leaves, each padded to whole
   blocks, form R rows.
2. A block is sent as 256 integers in [-127, 127] and, in 4 more bytes, the float32 scale max |x| / 127. Values are
   rounded to the nearest integer, without randomness, and a bucket needs two collectives. A block with a NaN or an
   infinity is sent with the scale NaN: all of it becomes NaN on every device, so the norm of the same step is NaN.
3. Error feedback: rounding errors are added to the next step's gradients, so that they do not accumulate. The sum of
   the gradients of all steps differs from the exact sum only by the latest errors. Errors are in units of the mean
   gradient, for any weights of the batches. `TrainState.extra` holds them; each device has its own.
4. The loss and its weight are summed exactly, before everything else.

Bytes: 1 + 4 / 256 per element in each direction instead of the reduce width, 0.254 times float32's all-reduce on a
ring. (N - 1) / N of that goes into and out of each device, twice. `cost` counts the operand of an all-reduce once
although it moves twice, so it shows 2.03 bytes per element instead of data parallelism's 4. All of it is on the
critical path, after backward. The step is compute-bound if the tokens per device exceed C / 4W, a quarter of the number
for data parallelism. Memory: one float32 copy of the local gradients, and 1 / N of another.

It composes with fsdp (the shards are summed over `data`), tensor, context, expert, pipe and accumulation, but not with
ZeRO stages or local steps. Sums inside backward, such as FSDP's reduce-scatters, are not compressed.

Source: Seide et al. 2014, "1-Bit Stochastic Gradient Descent", section 2 (error feedback); Karimireddy et al. 2019,
"Error Feedback Fixes SignSGD", algorithm 1; Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization",
section 2.1; Wang et al. 2023, "ZeRO++", section 3.3 (quantized gradients by all-to-all).
"""

import hashlib
import json
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct, lax

from ..layouts.table import LayoutRow, LayoutTable, make_row
from ..layouts.tensor_layout import TensorLayout
from .collectives import Collective, StepCounts
from .data import SCALARS, axes_to_sum, scalar_width
from .options import scaled
from .plan import Reduced, ShardingPlan, as_stored, splits_nothing, unchanged
from .xla.ordered_collectives import order_after

AXIS = "data"
OPTIONS = None
SPLITS = ()
layout = update_layout = splits_nothing
used_layout = as_stored
begin = finish = unchanged

BLOCK = 256
"""Elements that share a scale."""
SCALE_BYTES = 4


class Errors(NamedTuple):
    """The rounding errors in `TrainState.extra`: one array for each bucket, with dim 0 split over devices.

    Attributes:
        sent: The errors of each device's own gradients, (devices, R, 256) float32.
        returned: The errors of the rows that each device sums for all devices, (devices, R / N, 256) float32.
    """

    sent: tuple[Array, ...]
    returned: tuple[Array, ...]


class _Bucket(NamedTuple):
    """Gradients that still have to be summed over the same axes.

    Attributes:
        axes: The axes.
        members: The indices of the gradients among the leaves.
        devices: N, the number of devices in a group.
        rows: R, the number of blocks of all members, each padded to whole blocks, padded to a multiple of N.
    """

    axes: tuple[str, ...]
    members: tuple[int, ...]
    devices: int
    rows: int


def _buckets(plan: ShardingPlan) -> list[_Bucket]:
    leaves = plan.trained.update_table.rows
    missing = [axes_to_sum(leaf.layout, plan.summed_axes) for leaf in leaves]
    buckets = []
    for lacking in dict.fromkeys(lacking for lacking in missing if lacking):
        members = tuple(index for index, other in enumerate(missing) if other == lacking)
        devices = prod(plan.mesh_size(axis) for axis in lacking)
        rows = sum(_rows(leaves[index].elements_per_device) for index in members)
        buckets.append(_Bucket(lacking, members, devices, -(-rows // devices) * devices))
    return buckets


def _rows(elements: int) -> int:
    return -(-elements // BLOCK)


def reduce(found: Reduced, plan: ShardingPlan) -> Reduced:
    """Sums scalars exactly and gradients in 8 bits, if compression is enabled; errors are not scaled by the loss
    scale."""
    if not plan.compressed:
        return found
    leaves, treedef = jax.tree.flatten(found.gradients)
    scalars = list(lax.psum(list(order_after(leaves, list(found.scalars))), plan.summed_axes))
    weight = scaled(jnp.where(scalars[1] == 0, 1, scalars[1]), found.scale).astype(jnp.float32)
    reduced, sent, returned = list(leaves), [], []
    for bucket, owed, owed_sum in zip(_buckets(plan), found.errors.sent, found.errors.returned, strict=True):
        members = [leaves[index] for index in bucket.members]
        mean = _as_rows([leaf.astype(jnp.float32) / weight for leaf in members], bucket.rows)
        total, own_error, sum_error = _exchange(mean, owed[0], owed_sum[0], bucket.axes)
        sent.append(own_error[None])
        returned.append(sum_error[None])
        for index, leaf in zip(bucket.members, _as_leaves(total * weight, members), strict=True):
            reduced[index] = leaf.astype(leaves[index].dtype)
    errors = Errors(tuple(sent), tuple(returned))
    return Reduced(jax.tree.unflatten(treedef, reduced), scalars, errors, found.scale)


def _exchange(mean_RB: Array, owed_RB: Array, owed_sum_SB: Array, axes: tuple[str, ...]) -> tuple[Array, Array, Array]:
    """Computes one compressed sum of (R, B) float32 arrays, the same on all devices, and the new errors.

    R rows of B = 256 values; this device sums S = R / N of them.
    """
    wanted_RB = mean_RB + owed_RB
    packed_RP = quantize(wanted_RB)
    pieces_NSP = packed_RP.reshape(lax.axis_size(axes), -1, packed_RP.shape[-1])
    received_NSP = lax.all_to_all(pieces_NSP, axes, split_axis=0, concat_axis=0)
    sum_SB = dequantize(received_NSP).sum(0) + owed_sum_SB
    packed_SP = quantize(sum_SB)
    total_RB = dequantize(lax.all_gather(packed_SP, axes, axis=0, tiled=True, to="invarying"))
    return total_RB, wanted_RB - dequantize(packed_RP), sum_SB - dequantize(packed_SP)


def quantize(values: Array) -> Array:
    """Rounds blocks of numbers to 8 bits.

    Args:
        values: (..., B) float32, one block along the last dim.

    Returns:
        (..., B + 4) int8: B integers, then the bytes of the block's scale, NaN if not all of its values are finite.
    """
    scale = jnp.max(jnp.abs(values), axis=-1, keepdims=True) / 127
    divisor = jnp.where(scale > jnp.finfo(jnp.float32).tiny, scale, 1)
    divisor = jnp.where(jnp.isfinite(values).all(axis=-1, keepdims=True), divisor, jnp.nan)
    integers = jnp.round(values / divisor).astype(jnp.int8)
    scale_bytes = lax.bitcast_convert_type(divisor, jnp.int8)[..., 0, :]
    return jnp.concatenate([integers, scale_bytes], axis=-1)


def dequantize(packed: Array) -> Array:
    """Returns the rounded float32 values, (..., B); a block that was not finite is all NaN."""
    integers, scale_bytes = packed[..., :-SCALE_BYTES], packed[..., -SCALE_BYTES:]
    scale = lax.bitcast_convert_type(scale_bytes, jnp.float32)
    return integers.astype(jnp.float32) * scale[..., None]


def _as_rows(leaves: Sequence[Array], rows: int) -> Array:
    """Packs leaves into (rows, 256), each starting on a new row, so that no block has values of two leaves."""
    padded = [jnp.pad(leaf.reshape(-1), (0, -leaf.size % BLOCK)).reshape(-1, BLOCK) for leaf in leaves]
    blocks = jnp.concatenate(padded)
    return jnp.pad(blocks, ((0, rows - blocks.shape[0]), (0, 0)))


def _as_leaves(rows_RB: Array, like: Sequence[Array]) -> list[Array]:
    leaves, start = [], 0
    for leaf in like:
        count = _rows(leaf.size)
        leaves.append(rows_RB[start : start + count].reshape(-1)[: leaf.size].reshape(leaf.shape))
        start += count
    return leaves


def errors_table(plan: ShardingPlan) -> LayoutTable:
    """Returns the layouts of `Errors`: each device has its own errors."""
    sent, returned = [], []
    for number, bucket in enumerate(_buckets(plan)):
        sent.append(_errors_row(f"sent/{number}", plan, bucket.rows))
        returned.append(_errors_row(f"returned/{number}", plan, bucket.rows // bucket.devices))
    treedef = jax.tree.structure(Errors(tuple(sent), tuple(returned)))
    return LayoutTable(rows=(*sent, *returned), treedef=treedef, mesh=plan.mesh)


def packing(plan: ShardingPlan) -> str:
    """Returns a hash of all that decides which elements the rows of `Errors` belong to; "" without compression."""
    if not plan.compressed:
        return ""
    rows = plan.trained.update_table.rows
    stages = plan.pipeline.stages if plan.pipeline else None
    layouts = [[row.layout.axes_of_dim(dim) for dim in range(len(row.shape))] for row in rows]
    facts = {
        "mesh": plan.mesh.split_axes,
        "summed": plan.summed_axes,
        "leaves": [(row.path, row.shape, layout) for row, layout in zip(rows, layouts, strict=True)],
        "blocks": stages.order.tolist() if stages else None,
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _errors_row(path: str, plan: ShardingPlan, rows: int) -> LayoutRow:
    devices = prod(plan.mesh_size(axis) for axis in plan.summed_axes)
    leaf = ShapeDtypeStruct((devices, rows, BLOCK), jnp.float32)
    layout = TensorLayout((plan.summed_axes, None, None), plan.mesh)
    return make_row(path, leaf, "compressed: each device its own", layout)


def cost(plan: ShardingPlan, counts: StepCounts, platform: str) -> list[Collective]:
    """Returns the collectives of one step: the scalars' all-reduce, and two collectives for each bucket."""
    if not plan.compressed:
        return []
    axes = plan.summed_axes
    complete = any(not axes_to_sum(row.layout, axes) for row in plan.trained.update_table.rows)
    scalars = SCALARS + counts.metrics + complete
    lines = [Collective("all-reduce", axes, 1, scalars * scalar_width(plan.options.precision.reduce))]
    for bucket in _buckets(plan):
        packed = bucket.rows * (BLOCK + SCALE_BYTES)
        lines += [Collective(kind, bucket.axes, 1, packed) for kind in ("all-to-all", "all-gather")]
    return lines


def check(plan: ShardingPlan) -> list[str]:
    """Rejects gradients that are split over axes left to XLA, which would have to gather them first."""
    return [
        f"{row.path} has the layout {row.layout} by rule {row.rule!r}: with strategy.data.compress="
        f"{plan.configs[AXIS].compress}, a parameter is split only over axes whose strategies are explicit, here "
        f"{' and '.join(plan.manual_axes)}. Set strategy.tensor.explicit=true, or strategy.data.compress=none."
        for row in plan.update_table.rows
        if plan.compressed and set(row.layout.used_axes) - set(plan.manual_axes)
    ]
