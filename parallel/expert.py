"""Expert parallel: the experts of a mixture are on different devices; positions are sent to their experts and back.

Use it if the experts of a mixture do not fit on one device. Put it on the fastest links, since every block waits for
its all-to-alls.

Syntax, for rows B split over the axis `expert` of size X (as over data and fsdp), N = B_expert x L positions on one
device, k experts for each position out of E, and R rows of a buffer for each pair of devices:

    route      Choice[N, k], Gate[N, k] = top-k of softmax(x[N, D] . Wr[D, E])                 no communication
    dispatch   In[X, R, D] = rows of x, by the device of their expert, then by expert
               In[X, R, D] = all-to-all over expert of In, and of the number of rows per expert    critical path
    compute    Out[X, R, D] = In . expert_e, each block of rows with its own expert            no communication
    combine    Out[X, R, D] = all-to-all over expert of Out                                    critical path
               y[N, D] = sum over k of Gate[N, k] x the row of Out for it
    backward   the transposes: two all-to-alls of the same buffers                             critical path
               dW[E_expert, ...]                    complete over expert: every position was processed here

1. Each device holds E / X experts and never gathers the others. Their gradients are already complete over `expert`. All
   other gradients (attention, norms, the router) must still be summed over it, because rows are split over the axis.
2. Sizes in a compiled program cannot depend on data, so a buffer has R rows for any choice of the router (`buffer_of`).
   With a capacity C for each expert and row, R is E / X experts x B x C. Positions over the capacity are dropped, and
   only the residual stream carries them. Without a capacity (dropless), R is the worst case: N x min(k, E / X).
3. Rows in a buffer are grouped by expert, and each group starts a new block (`blocks/grouped_experts.py`). Empty blocks
   are not computed, so the worst case costs memory and bytes but no operations. E integers hold the number of rows in
   each group.
4. Positions split over `tensor` are gathered before the dispatch and scattered after the combine, as for any MLP. The
   devices along `tensor` hold columns of the same experts, so each sends the same buffers.
5. Positions split over `context` stay on their devices. Capacity counts along a whole row, so the choices (k integers
   per position) are gathered first.

Bytes per block and microbatch: 4 all-to-alls of X x R x D elements in the compute dtype, two in forward and two in
backward, and 4 E bytes of counts. (X - 1) / X of that leaves the device. With capacity factor c, X x R is about c k N.
Dropless, it is X N min(k, E / X), up to X / c times as much, of which only k N rows are used (an all-to-all of ragged
parts, if a backend has one, would not send the rest). The step is compute-bound if the products of an expert take
longer than the transfers: 3 F / (2 c) > C / W, where F is the width of an expert, C a device's FLOP/s and W its network
bandwidth in bytes/s (2-byte elements, three products, every row sent both ways). Dropless, use c = X min(k, E / X) / k.

Source: Lepikhin et al. 2020, "GShard", sections 2.2 (capacity of a group, auxiliary loss) and 3.1 (dispatch); Fedus et
al. 2021, "Switch Transformers", section 2.2; Zoph et al. 2022, "ST-MoE", section 3.3 (z-loss); Gale et al. 2022,
"MegaBlocks", section 4 (dropless).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .collectives import Collective, Traffic, own_collectives, wire_bytes
from .options import check_options
from .plan import as_stored, no_problems, split_by_model, splits_nothing, summed_elsewhere, unchanged

AXIS = "expert"
MIN_BLOCK, MAX_BLOCK, TILE = 8, 512, 128


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Options of the strategy `expert`."""

    size: int = 1
    """Devices over which the experts of a mixture are split; rows of a batch are split over them too; -1 = the rest."""

    def __post_init__(self) -> None:
        check_options(AXIS, self)


OPTIONS = ExpertConfig
SPLITS = ("rows", "parameters", "work")
layout = partial(split_by_model, AXIS)
update_layout = splits_nothing
used_layout = as_stored
begin = finish = unchanged
reduce = summed_elsewhere
check = no_problems
cost = partial(own_collectives, AXIS)


def size_problems(config: ExpertConfig, experts: int) -> Iterator[str]:
    """Checks a model's sizes for this strategy.

    Args:
        config: The strategy's options, with a positive size.
        experts: E, the number of experts in the model; 0 if it does not have any.

    Yields:
        Error messages with the config keys.
    """
    size = config.size
    if experts == 0 and size > 1:
        yield (
            f"strategy.expert={size}: this model does not have experts to split. Set model.name=moe, or give these "
            "devices to strategy.data or strategy.fsdp."
        )
    elif experts % size:
        yield (
            f"model.experts={experts} cannot be split over strategy.expert={size}: {experts} % {size} = "
            f"{experts % size}. Set model.experts to a multiple of {size}, or strategy.expert to a divisor of "
            f"{experts}."
        )


class Buffer(NamedTuple):
    """The sizes of the buffer that one device sends to each device, including itself.

    Attributes:
        devices: X, the number of devices along the axis.
        experts: e = E / X, the number of experts on each device.
        rows: R, the number of rows for each device; a multiple of `block`.
        block: m, the number of rows in a block; each expert's rows start a new one.
        expected: The expected number of blocks with rows that one device receives, from all devices, if all experts are
            chosen equally often.
    """

    devices: int
    experts: int
    rows: int
    block: int
    expected: int


def buffer_of(config: ExpertConfig, overhead: int, *, experts: int, top_k: int, positions: int, limit: int) -> Buffer:
    """Returns the smallest buffer that fits any choice of the router.

    A block has a quarter of an expert's average number of positions, between MIN_BLOCK and MAX_BLOCK. Padding then adds
    one eighth on average. If each block also costs as much as G rows, as on GPUs: of r positions,
    (r / m + 1 / 2) (m + G) is least for m = sqrt(2 G r). The limit is divided into equal blocks of about that size, in
    tiles of a product, so that the last block is hardly larger than the limit requires.

    Args:
        config: The strategy's options, X = `size`.
        overhead: G, see `platform.overhead_of`; 0 = a quarter.
        experts: E, the number of experts in the whole model.
        top_k: k, the number of different experts for each position.
        positions: N, the number of positions on one device.
        limit: The largest number of a device's positions for one expert: N, or the capacity if that is less.
    """
    own = experts // config.size
    share = max(1, positions * top_k // (4 * experts))
    block = min(MAX_BLOCK, max(MIN_BLOCK, 1 << (share.bit_length() - 1)))
    if best := isqrt(8 * overhead * share):
        tile = TILE if min(best, limit) >= TILE else MIN_BLOCK
        block = -(-limit // (-(-limit // best) * tile)) * tile
    together = min(positions * min(top_k, own), own * limit) + own * (block - 1)
    apart = own * -(-limit // block) * block
    rows = min(together // block * block, apart)
    used = min(positions * top_k, experts * limit)  # by all experts, and by the own ones from all devices
    expected = max(-(-used // block) + experts // 2, min(used, experts))  # groups end in the middle of a block
    return Buffer(config.size, own, rows, block, min(expected, config.size * rows // block))


class Placement(NamedTuple):
    """The rows of the buffers that are assigned to the choices of each position.

    Attributes:
        row_Nk: The row of each choice, out of X * R; X * R for a dropped choice. int32, (N, k).
        choice_M: The choice n * k + j in each row; N * k for an empty row. int32, (X * R,).
        count_E: The number of rows for each expert. int32, (E,).
        buffer: The sizes of the buffer.
    """

    row_Nk: Array
    choice_M: Array
    count_E: Array
    buffer: Buffer


def placement(buffer: Buffer, expert_Nk: Array, kept_Nk: Array) -> Placement:
    """Assigns rows of the buffers to choices: by device, by expert, then in their own order.

    Args:
        buffer: The sizes of the buffer.
        expert_Nk: The different experts that each position chooses, int32 (N, k).
        kept_Nk: False for dropped choices, bool (N, k).
    """
    devices, experts, rows, block, _ = buffer
    chosen, kept = expert_Nk.reshape(-1), kept_Nk.reshape(-1)
    place, count_E = places(chosen[None], kept[None], devices * experts)
    group_Xe = -(-count_E.reshape(devices, experts) // block) * block
    start_Xe = jnp.cumsum(group_Xe, axis=1) - group_Xe + jnp.arange(devices)[:, None] * rows
    row = jnp.where(kept, jnp.take(start_Xe.reshape(-1), chosen) + place[0], devices * rows)
    choice = jnp.arange(chosen.shape[0], dtype=jnp.int32)
    choice_M = jnp.full((devices * rows,), chosen.shape[0], jnp.int32).at[row].set(choice, mode="drop")
    return Placement(row.reshape(expert_Nk.shape).astype(jnp.int32), choice_M, count_E[0], buffer)


def places(expert_Bn: Array, counted_Bn: Array | None, experts: int) -> tuple[Array, Array]:
    """Counts, for each choice, the earlier choices of the same expert in its row, and all choices of each expert.

    Args:
        expert_Bn: The chosen experts, int32 (B, n); each row is counted separately.
        counted_Bn: The choices to count, bool (B, n); None = all.
        experts: E, the number of experts.

    Returns:
        The two counts, int32 (B, n) and (B, E).
    """
    chosen_BnE = expert_Bn[:, :, None] == jnp.arange(experts)[None, None, :]
    if counted_Bn is not None:
        chosen_BnE &= counted_Bn[:, :, None]
    upto_BnE = jnp.cumsum(chosen_BnE, axis=1, dtype=jnp.int32)
    place_Bn = jnp.take_along_axis(upto_BnE, expert_Bn[:, :, None], axis=2)[:, :, 0] - 1
    return place_Bn, upto_BnE[:, -1]


def dispatch(placed: Placement, x_ND: Array) -> tuple[Array, Array]:
    """Sends every position to the devices of its experts.

    Args:
        placed: The assigned rows.
        x_ND: The per-device positions, (N, D).

    Returns:
        The rows from each device, (X * R, D), and the local expert of each block of rows, e for an empty block, int32
        (X * R / m,).
    """
    devices, experts, rows, block, _ = placed.buffer
    x_MD = _take_rows(x_ND, placed.choice_M // placed.row_Nk.shape[1], placed.row_Nk)
    count_Xe = placed.count_E.reshape(devices, experts)
    x_MD, count_Xe = _exchange(x_MD, devices), _exchange(count_Xe, devices)
    end_Xe = jnp.cumsum(-(-count_Xe // block), axis=1)
    expert_Xb = jnp.sum(jnp.arange(rows // block)[None, :, None] >= end_Xe[:, None, :], axis=2, dtype=jnp.int32)
    return x_MD, expert_Xb.reshape(-1)


def combine(placed: Placement, y_MD: Array) -> Array:
    """Sends the results of experts back to their positions: (X * R, D) to (N, k, D), zeros for dropped choices."""
    y_nD = _take_rows(_exchange(y_MD, placed.buffer.devices), placed.row_Nk.reshape(-1), placed.choice_M[:, None])
    return y_nD.reshape(*placed.row_Nk.shape, -1)


def _exchange(x_M: Array, devices: int) -> Array:
    """Sends part i of dim 0 to device i, and receives part i from device i; the transpose is the same operation."""
    return x_M if devices == 1 else lax.all_to_all(x_M, AXIS, split_axis=0, concat_axis=0, tiled=True)


@jax.custom_vjp
def _take_rows(x_ND: Array, row_M: Array, back_Nk: Array) -> Array:
    """Takes rows of an array by index; an index past the end gives zeros.

    The inverse indices are given too, so that backward also takes rows instead of the scatter-add of autodiff.

    Args:
        x_ND: The array, (N, D).
        row_M: The indices, int32 (M,): y[m] = x[row[m]].
        back_Nk: The inverse, int32 (N, k): the rows of y that are copies of row n of x; unused entries are past the
            end of y.
    """
    return jnp.take(x_ND, row_M, axis=0, mode="fill", fill_value=0)


def _take_rows_backward(back_Nk: Array, dy_MD: Array) -> tuple[Array, None, None]:
    return jnp.sum(jnp.take(dy_MD, back_Nk, axis=0, mode="fill", fill_value=0), axis=1), None, None


_take_rows.defvjp(lambda x_ND, row_M, back_Nk: (_take_rows(x_ND, row_M, back_Nk), back_Nk), _take_rows_backward)


def traffic(buffer: Buffer, *, width: int, dtype: Any, platform: str) -> Traffic:
    """Returns the traffic of one dispatch and combine of a block.

    Args:
        buffer: The sizes of the buffer.
        width: D, the width of a position.
        dtype: The compute dtype.
        platform: The platform of the step, which determines the bytes of 16-bit numbers, see `wire_bytes`.
    """
    if buffer.devices == 1:
        return Traffic()
    rows = buffer.devices * buffer.rows * width * wire_bytes(dtype, platform)
    counts = buffer.devices * buffer.experts * 4
    forward = (Collective("all-to-all", (AXIS,), 3, 2 * rows + counts),)
    return Traffic(forward, (Collective("all-to-all", (AXIS,), 2, 2 * rows),), forward)
