"""Expert parallel: the experts of a mixture live on different devices, and positions travel to theirs and back.

Use it for a mixture whose experts do not fit on one device, on the fastest links: blocks wait for its all-to-alls.

Syntax, for rows B split over the axis `expert` of size X (as over data and fsdp), N = B_expert x L positions on one
device, k experts for each position out of E, and R rows of a buffer for each pair of devices:

    route      Choice[N, k], Gate[N, k] = top-k of softmax(x[N, D] . Wr[D, E])                 no communication
    dispatch   In[X, R, D] = rows of x, by the device of their expert, then by expert
               In[X, R, D] = all-to-all over expert of In, and of how many for each expert    critical path
    compute    Out[X, R, D] = In . expert_e, each block of rows by its own                     no communication
    combine    Out[X, R, D] = all-to-all over expert of Out                                    critical path
               y[N, D] = sum over k of Gate[N, k] x the row of Out for it
    backward   the transposes: two all-to-alls of the same buffers                             critical path
               dW[E_expert, ...]                              complete over expert: every position came here

1. Each device holds E / X experts and never gathers the others. Their gradients lack no sum over `expert`; those of
   everything else (attention, norms, the router) do, since rows are split over the axis.
2. A compiled program knows no sizes that depend on data, so a buffer has R rows whatever the router chooses
   (`buffer_of`). With a capacity C for each expert and row, R is what C allows: E / X experts x B x C. What is over it
   is dropped, and the residual stream carries it on. Without (dropless), R is the worst case: N x min(k, E / X).
3. Rows in a buffer are grouped by expert, and groups begin blocks (`blocks/grouped_experts.py`). Only blocks that hold
   something are computed: a worst case costs memory and bytes, not operations. E integers count each group's rows.
4. Positions split over `tensor` are gathered before they are dispatched and scattered after they are combined, like
   those of any MLP. The devices along `tensor` hold columns of the same experts: each sends the same buffers.
5. Positions split over `context` stay: capacity counts along a row, so choices (k integers each) are gathered first.

Bytes a block and microbatch: 4 all-to-alls of X x R x D elements in the compute dtype, two forward and two backward,
and 4 E bytes of counts; (X - 1) / X of it leaves the device. With capacity factor c, X x R is about c k N; dropless it
is X N min(k, E / X), up to X / c times more, of which only k N rows hold something (an all-to-all of ragged parts,
where a backend has it, would not send the rest). Compute-bound where the products of an expert outlast the moves:
3 F / (2 c) > C / W with F the width of an expert, C the FLOP/s of a device and W its bytes/s into the network (2-byte
elements, three products, every row sent there and back); dropless with c = X min(k, E / X) / k.

Source: Lepikhin et al. 2020, "GShard", sections 2.2 (capacity of a group, auxiliary loss) and 3.1 (dispatch); Fedus et
al. 2021, "Switch Transformers", section 2.2; Zoph et al. 2022, "ST-MoE", section 3.3 (z-loss); Gale et al. 2022,
"MegaBlocks", section 4 (dropless).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..layouts.tensor_layout import TensorLayout
from ..mesh.options import check_options
from ..mesh.shapes import divisors
from .collectives import Collective, StepCounts, Traffic, wire_bytes
from .plan import (
    MeshPlan,
    Parameter,
    ShardingPlan,
    as_stored,
    no_problems,
    split_by_model,
    splits_nothing,
    summed_elsewhere,
    unchanged,
)

AXIS = "expert"
SMALLEST_BLOCK, LARGEST_BLOCK = 8, 512


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Options of the strategy `expert`."""

    size: int = 1
    """Devices that share out the experts of a mixture; rows of a batch are split over them too; -1 = the rest."""

    def __post_init__(self) -> None:
        check_options(AXIS, self)


OPTIONS = ExpertConfig
SPLITS = ("rows", "parameters", "work")
update_layout = splits_nothing
used_layout = as_stored
begin = finish = unchanged
reduce = summed_elsewhere
check = no_problems


def layout(parameter: Parameter, placed: TensorLayout, plan: MeshPlan) -> tuple[TensorLayout, str]:
    """Where one parameter lives: split as the model works on it."""
    return split_by_model(parameter, placed, AXIS)


def cost(plan: ShardingPlan, counts: StepCounts, platform: str) -> list[Collective]:
    """What the model itself moves over the axis in one step."""
    return counts.own_over(AXIS)


def size_problems(config: ExpertConfig, experts: int) -> list[str]:
    """Problems of a model's sizes with this strategy.

    Args:
        config: The strategy's options, with a size above 0.
        experts: Experts of the model, E; 0 for a model without.

    Returns:
        Messages that name the config keys and what works; empty where all is well.
    """
    size = config.size
    if size == 1:
        return []
    if experts == 0:
        return [
            f"strategy.expert={size}: this model has no experts to share out. Set model.name=moe, or give these "
            "devices to strategy.data or strategy.fsdp."
        ]
    if experts % size == 0:
        return []
    fitting = [n for n in divisors(size) if experts % n == 0]  # whatever the devices, these can be made of them
    return [
        f"model.experts={experts} cannot be shared out over strategy.expert={size}: {experts} % {size} = "
        f"{experts % size}. Set model.experts to {experts + size - experts % size}, or strategy.expert to one of "
        f"{fitting}."
    ]


class Buffer(NamedTuple):
    """Sizes of what one device sends to each of the others, and to itself.

    Attributes:
        devices: X, devices of the axis.
        experts: e = E / X, experts on each of them.
        rows: R, rows for each device; a multiple of `block`.
        block: m, rows of one block; each expert's rows begin a new one.
    """

    devices: int
    experts: int
    rows: int
    block: int


def buffer_of(config: ExpertConfig, *, experts: int, top_k: int, positions: int, most: int) -> Buffer:
    """The smallest buffer that holds whatever the router may choose.

    Blocks are a quarter of an expert's share of the positions, within limits: padding then costs an eighth.

    Args:
        config: The strategy's options, X = `size`.
        experts: E, of the whole model.
        top_k: k, different experts that each position chooses.
        positions: N, positions on one device.
        most: The most positions of a device that one expert takes: N, or what capacity allows if that is less.
    """
    own = experts // config.size
    share = max(1, positions * top_k // (4 * experts))
    block = min(LARGEST_BLOCK, max(SMALLEST_BLOCK, 1 << (share.bit_length() - 1)))
    together = min(positions * min(top_k, own), own * most) + own * (block - 1)
    apart = own * _round_up(most, block)
    return Buffer(config.size, own, min(_round_down(together, block), apart), block)


def _round_up(rows: int, block: int) -> int:
    return -(-rows // block) * block


def _round_down(rows: int, block: int) -> int:
    return rows // block * block


class Placement(NamedTuple):
    """Which row of the buffers every choice of a position gets.

    Attributes:
        row_Nk: int32, (N, k): of all X * R rows; X * R itself where the choice is dropped.
        choice_M: int32, (X * R,): the choice n * k + j that a row holds; N * k where it is empty.
        count_E: int32, (E,): rows for each expert.
        buffer: The sizes.
    """

    row_Nk: Array
    choice_M: Array
    count_E: Array
    buffer: Buffer


def placement(buffer: Buffer, expert_Nk: Array, kept_Nk: Array) -> Placement:
    """Places the choices in the buffers: by device, by expert, then in their own order.

    Args:
        buffer: The sizes.
        expert_Nk: int32, (N, k), the experts that each position chooses, all different.
        kept_Nk: bool, (N, k), false where a choice is dropped.
    """
    devices, experts, rows, block = buffer
    chosen = expert_Nk.reshape(-1)
    kept = kept_Nk.reshape(-1)
    place, count_E = places(chosen[None], kept[None], devices * experts)
    group_Xe = -(-count_E.reshape(devices, experts) // block) * block
    start_Xe = jnp.cumsum(group_Xe, axis=1) - group_Xe + jnp.arange(devices)[:, None] * rows
    row = jnp.where(kept, jnp.take(start_Xe.reshape(-1), chosen) + place[0], devices * rows)
    choice = jnp.arange(chosen.shape[0], dtype=jnp.int32)
    choice_M = jnp.full((devices * rows,), chosen.shape[0], jnp.int32).at[row].set(choice, mode="drop")
    return Placement(row.reshape(expert_Nk.shape).astype(jnp.int32), choice_M, count_E[0], buffer)


def places(expert_Bn: Array, counted_Bn: Array | None, experts: int) -> tuple[Array, Array]:
    """How many earlier choices of a line are for the same expert, and how many there are for each.

    Args:
        expert_Bn: int32, (B, n), experts chosen; lines are counted one by one.
        counted_Bn: bool, (B, n), those that take a place; None = all.
        experts: E.

    Returns:
        int32 (B, n) and (B, E).
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
        placed: The places.
        x_ND: (N, D), per-device.

    Returns:
        (X * R, D), the rows that came from each device, and int32 (X * R / m,), the expert of each block of them among
        those held here, e where it is empty.
    """
    devices, experts, rows, block = placed.buffer
    x_MD = _take_rows(x_ND, placed.choice_M // placed.row_Nk.shape[1], placed.row_Nk)
    count_Xe = placed.count_E.reshape(devices, experts)
    if devices > 1:
        x_MD = _exchange(x_MD)
        count_Xe = _exchange(count_Xe)
    end_Xe = jnp.cumsum(-(-count_Xe // block), axis=1)
    expert_Xb = jnp.sum(jnp.arange(rows // block)[None, :, None] >= end_Xe[:, None, :], axis=2, dtype=jnp.int32)
    return x_MD, expert_Xb.reshape(-1)


def combine(placed: Placement, y_MD: Array) -> Array:
    """Brings back what experts made: (X * R, D) to (N, k, D), zeros where a choice was dropped."""
    if placed.buffer.devices > 1:
        y_MD = _exchange(y_MD)
    y_nD = _take_rows(y_MD, placed.row_Nk.reshape(-1), placed.choice_M[:, None])
    return y_nD.reshape(*placed.row_Nk.shape, -1)


def _exchange(x_M: Array) -> Array:
    """Part i of dim 0 goes to device i; what comes from device i becomes part i. Its own transpose."""
    return lax.all_to_all(x_M, AXIS, split_axis=0, concat_axis=0, tiled=True)


@jax.custom_vjp
def _take_rows(x_ND: Array, row_M: Array, back_Nk: Array) -> Array:
    """Rows of an array by index, zeros where the index is past its end.

    Where the rows go is known from both sides, so backward takes rows too, where autodiff would add up scattered ones.

    Args:
        x_ND: (N, D).
        row_M: int32, (M,): y[m] = x[row[m]].
        back_Nk: int32, (N, k), the inverse: the rows of y that were taken from row n of x, past its end for none.
    """
    return jnp.take(x_ND, row_M, axis=0, mode="fill", fill_value=0)


def _take_rows_forward(x_ND: Array, row_M: Array, back_Nk: Array) -> tuple[Array, Array]:
    return _take_rows(x_ND, row_M, back_Nk), back_Nk


def _take_rows_backward(back_Nk: Array, dy_MD: Array) -> tuple[Array, None, None]:
    return jnp.sum(jnp.take(dy_MD, back_Nk, axis=0, mode="fill", fill_value=0), axis=1), None, None


_take_rows.defvjp(_take_rows_forward, _take_rows_backward)


def traffic(buffer: Buffer, *, width: int, dtype: Any, platform: str) -> Traffic:
    """What one dispatch and combine of a block move.

    Args:
        buffer: The sizes.
        width: D, width of a position.
        dtype: The compute dtype.
        platform: Where the step runs; it decides the bytes of 16-bit numbers, see `wire_bytes`.
    """
    if buffer.devices == 1:
        return Traffic()
    rows = buffer.devices * buffer.rows * width * wire_bytes(dtype, platform)
    counts = buffer.devices * buffer.experts * 4
    there_and_back = partial(Collective, "all-to-all", (AXIS,))
    forward = (there_and_back(3, 2 * rows + counts),)
    return Traffic(forward, (there_and_back(2, 2 * rows),), forward)
