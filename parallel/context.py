"""Context parallel: every device holds some positions of each row; attention is where positions meet.

Use it where the activations of one row do not fit on one device. Take the ring for many devices and few key-value
heads; take `all_to_all` for short rings, where the number of heads is a multiple of the axis.

Syntax, for causal attention of L positions split over the axis `context` of size N, l = L / N on each device, with
H query heads, G key-value heads of width K, and rows B that are the same on all N devices:

    ring         Out[B, L_context, H, K] = sum over N steps of Q[B, L_context, H, K] . KV[2, B, L_context, G, K]
                 KV and, in backward, dKV move on by collective-permute                   beside the products of a step
    all_to_all   Q[B, L, H_context, K], KV[2, B, L, G_context, K] = all-to-all of Q[B, L_context, H, K], KV[...]
                 Out[B, L_context, H, K] = all-to-all of attention(Q, KV)[B, L, H_context, K]    on the critical path

Norms, projections and the MLP work on single positions and communicate nothing.

1. `ring`. A row is cut into 2 N chunks, and device r holds chunks r and 2 N - 1 - r: an early one that sees little and
   a late one that sees much, so that all devices do equal work in every step of the ring (`blocks/attention/ring.py`).
   Forward: N - 1 collective-permutes of keys and values, 2 B l G K elements each, in the compute dtype. Backward: the
   same once more, and N - 1 of their gradients, 2 B l G K elements each, in float32 (or wider). Each runs beside the
   products of the step before it is needed: not on the critical path where these take longer than the permute,

       l > w (G / H) C / W    in forward,      l > 2/5 (w + 4) (G / H) C / W    in backward,

   with C the FLOP/s of a device, W its bytes/s to its neighbour, and w the bytes of a number in the compute dtype.
2. `all_to_all`. Device r holds the positions from r l to r l + l. One all-to-all of queries, keys and values gives each
   device all positions of H / N heads, the attention of one device follows, and a second one brings its result back:
   B l (H + 2 G') K and B l H K elements, in the compute dtype; the same in backward. Key-value heads are repeated
   N / gcd(G, N) times first, to G' of them, where N does not divide their number. All on the critical path; a device
   sends (N - 1) / N of it to others; compute-bound where L > w (1 + G' / H) C / W. H has to be a multiple of N.
3. Documents packed into one row carry segment ids, (B, L). Every device has all of them, as it has the batch: neither
   way moves them.

Bytes: the ring sends N - 1 times G / H of what one all-to-all of the queries does. It wins where G is small and the
step is long enough to hide it, and it knows no limit by the number of heads.

Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context", section 3; Brandon et
al. 2023, "Striped Attention", section 3 (balancing a causal ring); Llama team 2024, "The Llama 3 Herd of Models",
section 3.3.2 (balancing by chunks r and 2 N - 1 - r); Jacobs et al. 2023, "DeepSpeed Ulysses", section 3 (all-to-all).
"""

from dataclasses import dataclass
from math import gcd
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array, lax

from ..mesh.options import check_options
from ..mesh.shapes import divisors
from .collectives import Collective, StepCounts, Traffic, wire_bytes
from .plan import ShardingPlan, as_stored, splits_nothing, summed_elsewhere, unchanged

AXIS = "context"
Attention = Literal["ring", "all_to_all"]


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """Options of the strategy `context`."""

    size: int = 1
    """Devices over which the positions of each row are split; -1 = the rest."""
    attention: Attention = "ring"
    """How positions on different devices meet: ring (keys and values go round, beside the compute) or all_to_all (each
    device attends for some of the heads)."""

    send: Literal["pairs", "groups"] = "pairs"
    """How a ring sends: in pairs (collective-permute), or in groups (an all-to-all of N times the bytes). Simulated
    devices beside a pipeline send in groups whatever is chosen here, see `xla/neighbours.py`."""

    def __post_init__(self) -> None:
        check_options(AXIS, self)

    @property
    def num_chunks(self) -> int:
        """Pieces of equal length that a row is cut into."""
        return 2 * self.size if self.attention == "ring" and self.size > 1 else self.size


OPTIONS = ContextConfig
SPLITS = ("work",)
layout = splits_nothing
update_layout = splits_nothing
used_layout = as_stored
begin = finish = unchanged
reduce = summed_elsewhere


def check(plan: ShardingPlan) -> list[str]:
    """Says that a model cannot split the positions of a row."""
    if AXIS not in plan.configs or plan.mesh_size(AXIS) == 1 or AXIS in plan.manual_axes:
        return []
    return [
        f"strategy.context={plan.mesh_size(AXIS)}: model {plan.model_name!r} cannot split the positions of a row. Use "
        "a model with `parallelize`, such as the transformer, or give the devices to strategy.data or fsdp."
    ]


def cost(plan: ShardingPlan, counts: StepCounts, platform: str) -> list[Collective]:
    """What the model itself moves over the axis in one step."""
    return counts.own_over(AXIS)


def chunks_of(rank: Any, config: ContextConfig) -> tuple[Any, ...]:
    """The chunks that a device holds, in the order of their positions.

    Args:
        rank: The device's index along `context`: an int, or an int32 scalar inside `shard_map`.
        config: The strategy's options.

    Returns:
        (r, 2 N - 1 - r) for a ring of N devices, else (r,); of `num_chunks` chunks.
    """
    return (rank,) if config.num_chunks == config.size else (rank, config.num_chunks - 1 - rank)


def local_positions(length: int, config: ContextConfig) -> Array:
    """The positions of a row that this device holds, in increasing order. Inside `shard_map`.

    Args:
        length: Positions of a whole row, L; a multiple of `num_chunks`.
        config: The strategy's options, N = `size`.

    Returns:
        int32, (L / N,), per-device and varying over `context`; 0 to L - 1 on one device.
    """
    if config.size == 1:
        return jnp.arange(length, dtype=jnp.int32)
    num_positions = length // config.num_chunks
    within = jnp.arange(num_positions, dtype=jnp.int32)
    return jnp.concatenate([chunk * num_positions + within for chunk in chunks_of(lax.axis_index(AXIS), config)])


def size_problems(config: ContextConfig, length: int, heads: int) -> list[str]:
    """Problems of a model's sizes with this strategy.

    Args:
        config: The strategy's options, with a size above 0.
        length: Positions of a whole row.
        heads: Query heads on one device, once `tensor` has split them.

    Returns:
        Messages that name the config keys and the nearest values that work; empty where all is well.
    """
    size, problems = config.size, []
    if size == 1:
        return problems
    if length % config.num_chunks:
        below = length - length % config.num_chunks
        lengths = [n for n in (below, below + config.num_chunks) if n]
        per_device = config.num_chunks // size
        sizes = [n for n in divisors(size) if n == 1 or length % (n * per_device) == 0]  # what the devices can make up
        problems.append(
            f"data.length={length} cannot be split over strategy.context={size}: attention={config.attention} cuts a "
            f"row into {per_device} * {size} = {config.num_chunks} equal pieces, and {length} % {config.num_chunks} = "
            f"{length % config.num_chunks}. Set data.length to {' or '.join(map(str, lengths))}, or strategy.context "
            f"to {sizes[-1]}."
        )
    if config.attention == "all_to_all" and heads % size:
        sizes = [n for n in divisors(size) if heads % n == 0]
        more = heads - heads % size + size
        problems.append(
            f"model.heads: {heads} heads on one device cannot be split over strategy.context={size} with "
            f"attention=all_to_all: {heads} % {size} = {heads % size}. Set strategy.context to {sizes[-1]}, "
            f"model.heads to give {more} on one device, or strategy.context.attention to ring."
        )
    return problems


def traffic(
    config: ContextConfig,
    *,
    rows: int,
    length: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    dtype: Any,
    platform: str,
) -> Traffic:
    """What one call of attention moves.

    Args:
        config: The strategy's options, with a size above 0.
        rows: Rows of the batch on one device, B.
        length: Positions of a whole row, L.
        heads: Query heads on one device, H.
        kv_heads: Key-value heads on one device, G.
        head_size: Width of a head, K.
        dtype: The compute dtype.
        platform: Where the step runs; it decides the bytes of 16-bit numbers, see `wire_bytes`.
    """
    size, width = config.size, wire_bytes(dtype, platform)
    if size == 1:
        return Traffic()
    elements = rows * length // size * head_size  # of one head
    if config.attention == "ring":
        keys_and_values = 2 * elements * kv_heads
        gradients = keys_and_values * jnp.promote_types(dtype, jnp.float32).itemsize
        kind, copies = ("collective-permute", 1) if config.send == "pairs" else ("all-to-all", size)
        kv_line = Collective(kind, (AXIS,), size - 1, (size - 1) * copies * keys_and_values * width)
        gradient_line = Collective(kind, (AXIS,), size - 1, (size - 1) * copies * gradients)
        return Traffic((kv_line,), (kv_line, gradient_line), (kv_line,))
    kv_elements = elements * kv_heads * kv_repeats(kv_heads, config)
    there = Collective("all-to-all", (AXIS,), 1, (elements * heads + 2 * kv_elements) * width)
    back = Collective("all-to-all", (AXIS,), 1, elements * heads * width)
    return Traffic((there, back), (back, there), (there, back))


def kv_repeats(kv_heads: int, config: ContextConfig) -> int:
    """How often `all_to_all` repeats each key-value head, so that `size` divides their number."""
    return config.size // gcd(kv_heads, config.size)
