"""Context parallel: every device holds some positions of each row; only attention combines positions.

Use it if the activations of one row do not fit on one device. Choose the ring for many devices and few key-value heads.
Choose `all_to_all` for few devices, if the axis divides the number of heads.

Syntax, for causal attention of L positions split over the axis `context` of size N, l = L / N on each device, with
H query heads, G key-value heads of width K, and rows B that are the same on all N devices:

    ring         Out[B, L_context, H, K] = sum over N steps of Q[B, L_context, H, K] . KV[2, B, L_context, G, K]
                 KV and, in backward, dKV are sent on by collective-permute               overlaps the products
    all_to_all   Q[B, L, H_context, K], KV[2, B, L, G_context, K] = all-to-all of Q[B, L_context, H, K], KV[...]
                 Out[B, L_context, H, K] = all-to-all of attention(Q, KV)[B, L, H_context, K]    on the critical path

Norms, projections and the MLP process each position separately and do not communicate.

1. `ring`. A row is cut into 2 N chunks, and device r holds chunks r and 2 N - 1 - r: an early chunk, which attends to
   few keys, and a late one, which attends to many. All devices therefore do equal work in every step of the ring
   (`blocks/attention/ring.py`). Forward has N - 1 collective-permutes of keys and values, 2 B l G K elements each, in
   the compute dtype. Backward repeats them, and has N - 1 permutes of their gradients, 2 B l G K elements each, in
   float32 (or wider). Each permute overlaps the products of the step before the one that needs it. It is off the
   critical path if these products take longer than the permute,

       l > w (G / H) C / W    in forward,      l > 2/5 (w + 4) (G / H) C / W    in backward,

   where C is a device's FLOP/s, W its bandwidth to a neighbor in bytes/s, and w the bytes of a number in the compute
   dtype.
2. `all_to_all`. Device r holds the positions from r l to r l + l. One all-to-all of queries, keys and values gives each
   device all positions of H / N heads. Each device then computes attention for its heads, and a second all-to-all
   returns the result. They move B l (H + 2 G') K and B l H K elements in the compute dtype, and backward moves the
   same. If N does not divide the number of key-value heads, each is first repeated N / gcd(G, N) times, which gives G'
   heads. All of this is on the critical path. A device sends (N - 1) / N of it to others, and the step is compute-bound
   if L > w (1 + G' / H) C / W. H must be a multiple of N.
3. Documents packed into one row have segment ids, (B, L). They are a part of the batch that every device has whole, so
   neither method moves them.

Bytes: the ring sends (N - 1) G / H times as much as one all-to-all of the queries. It is faster if G is small and each
step is long enough to hide the permutes, and the number of heads does not limit it.

Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context", section 3; Brandon et
al. 2023, "Striped Attention", section 3 (balancing a causal ring); Llama team 2024, "The Llama 3 Herd of Models",
section 3.3.2 (balancing by chunks r and 2 N - 1 - r); Jacobs et al. 2023, "DeepSpeed Ulysses", section 3 (all-to-all).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from .collectives import Collective, Traffic, own_collectives, wire_bytes
from .options import check_options
from .plan import ShardingPlan, as_stored, splits_nothing, summed_elsewhere, unchanged

AXIS = "context"


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """Options of the strategy `context`."""

    size: int = 1
    """Devices over which the positions of each row are split; -1 = the rest."""
    attention: Literal["ring", "all_to_all"] = "ring"
    """Attention between devices: ring (keys and values travel in a ring, which overlaps compute) or all_to_all (each
    device computes attention for some of the heads)."""

    def __post_init__(self) -> None:
        check_options(AXIS, self)

    @property
    def num_chunks(self) -> int:
        """The number of equal pieces that a row is split into."""
        return METHODS[self.attention].chunks * self.size if self.size > 1 else 1


OPTIONS = ContextConfig
SPLITS = ("work",)
layout = update_layout = splits_nothing
used_layout = as_stored
begin = finish = unchanged
reduce = summed_elsewhere
cost = partial(own_collectives, AXIS)


def check(plan: ShardingPlan) -> list[str]:
    """Rejects models that cannot split the positions of a row."""
    if AXIS not in plan.configs or plan.mesh_size(AXIS) == 1 or AXIS in plan.manual_axes:
        return []
    return [
        f"strategy.context={plan.mesh_size(AXIS)}: model {plan.model_name!r} cannot split the positions of a row. Use "
        "a model with `parallelize`, such as the transformer, or give the devices to strategy.data or fsdp."
    ]


def chunks_of(rank: Any, config: ContextConfig) -> tuple[Any, ...]:
    """Returns the chunks of a device, in the order of their positions.

    Args:
        rank: The device's index along `context`: an integer, or an int32 scalar inside `shard_map`.
        config: The strategy's options.

    Returns:
        (r, 2 N - 1 - r) for a ring of N devices, otherwise (r,); of `num_chunks` chunks.
    """
    return (rank,) if config.num_chunks == config.size else (rank, config.num_chunks - 1 - rank)


def local_positions(length: int, config: ContextConfig) -> Array:
    """Returns the positions of a row on this device, in increasing order. Inside `shard_map`.

    Args:
        length: L, the number of positions in a whole row; a multiple of `num_chunks`.
        config: The strategy's options, N = `size`.

    Returns:
        int32, (L / N,), per-device and varying over `context`; 0 to L - 1 on one device.
    """
    if config.size == 1:
        return jnp.arange(length, dtype=jnp.int32)
    num_positions = length // config.num_chunks
    within = jnp.arange(num_positions, dtype=jnp.int32)
    return jnp.concatenate([chunk * num_positions + within for chunk in chunks_of(lax.axis_index(AXIS), config)])


def size_problems(config: ContextConfig, length: int, heads: int) -> Iterator[str]:
    """Checks a model's sizes for this strategy.

    Args:
        config: The strategy's options, with a positive size.
        length: The number of positions in a whole row.
        heads: The number of query heads on one device, after `tensor` has split them.

    Yields:
        Error messages with the config keys.
    """
    size = config.size
    if size == 1:
        return
    if length % config.num_chunks:
        yield (
            f"data.length={length} cannot be split over strategy.context={size}: attention={config.attention} splits a "
            f"row into {config.num_chunks} equal pieces, and {length} % {config.num_chunks} = "
            f"{length % config.num_chunks}. Set data.length to a multiple of {config.num_chunks}, or lower "
            "strategy.context."
        )
    if METHODS[config.attention].splits_heads and heads % size:
        yield (
            f"model.heads: {heads} heads on one device cannot be split over strategy.context={size} with "
            f"attention={config.attention}: {heads} % {size} = {heads % size}. Set strategy.context to a divisor of "
            f"{heads}, or strategy.context.attention to ring."
        )


def traffic(config: ContextConfig, *, head: int, heads: int, kv_heads: int, dtype: Any, platform: str) -> Traffic:
    """Returns the traffic of one call of attention.

    Args:
        config: The strategy's options, with a positive size.
        head: The number of elements of one head, for all rows and positions of one device.
        heads: H, the number of query heads on one device.
        kv_heads: G, the number of key-value heads on one device.
        dtype: The compute dtype.
        platform: The platform of the step, which determines the bytes of 16-bit numbers, see `wire_bytes`.
    """
    if config.size == 1:
        return Traffic()
    width, wide = wire_bytes(dtype, platform), jnp.promote_types(dtype, jnp.float32).itemsize
    return METHODS[config.attention].traffic(config, head * heads, head, kv_heads, width, wide)


def _ring_traffic(config: ContextConfig, query: int, head: int, kv_heads: int, width: int, wide: int) -> Traffic:
    hops, keys_and_values = config.size - 1, 2 * head * kv_heads
    kv_line = Collective("collective-permute", (AXIS,), hops, hops * keys_and_values * width)
    gradient_line = Collective("collective-permute", (AXIS,), hops, hops * keys_and_values * wide)
    return Traffic((kv_line,), (kv_line, gradient_line), (kv_line,))


def _all_to_all_traffic(config: ContextConfig, query: int, head: int, kv_heads: int, width: int, wide: int) -> Traffic:
    keys_and_values = 2 * head * kv_heads * kv_repeats(kv_heads, config)
    forth = Collective("all-to-all", (AXIS,), 1, (query + keys_and_values) * width)
    back = Collective("all-to-all", (AXIS,), 1, query * width)
    return Traffic((forth, back), (back, forth), (forth, back))


class Method(NamedTuple):
    """An attention method, for planning; `blocks/attention/methods.py` has the functions that run.

    Attributes:
        chunks: The pieces of a row on each device.
        splits_heads: Whether the size must divide the number of heads.
        traffic: `traffic(config, query, head, kv_heads, width, wide) -> Traffic` of one call: `query` and `head` are
            the elements of all query heads and of one head on a device, `width` and `wide` the bytes of an element in
            the compute dtype and in float32 or wider.
    """

    chunks: int
    splits_heads: bool
    traffic: Callable[[ContextConfig, int, int, int, int, int], Traffic]


METHODS: dict[str, Method] = {
    "ring": Method(2, False, _ring_traffic),
    "all_to_all": Method(1, True, _all_to_all_traffic),
}
"""Attention methods by the name in `strategy.context.attention`."""


def kv_repeats(kv_heads: int, config: ContextConfig) -> int:
    """Returns the number of copies of each key-value head in `all_to_all`, so that `size` divides their number."""
    return config.size // gcd(kv_heads, config.size)
