"""Rotary positions and causal grouped-query attention, over one or several documents per row.

Letters: B rows, L positions, S positions of one slice, T positions that the slice sees, H query heads, G key-value
heads, R = H / G query heads that share a key-value head, K width of a head; b is B, or 1 if all rows are the same.

On NVIDIA GPUs, cuDNN's fused kernel computes attention if it supports the arrays. It keeps no scores: at 8,192
positions, 2 rows and 32 heads, a step of Llama-3 8B on fsdp 8 needs 22.7 GB of temporary memory instead of 53.4
(compiled for H100s with JAX 0.10.2, November 2026; see docs/gpu.md).

Sources: Su et al. 2021, "RoFormer" (rotary positions); Ainslie et al. 2023, "GQA" (grouped-query attention); Dao et al.
2022, "FlashAttention"; NVIDIA, "cuDNN Frontend: scaled dot product attention".
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..parallel.blocks.attention.cudnn_parts import is_supported
from .layers import narrow, recompute

NUM_SLICES = 4
MIN_SLICE = 64


class Slowing(NamedTuple):
    """Rotary frequencies divided by a factor, for rows longer than a model was first trained on.

    A frequency with many turns in a row of the first length distinguishes near positions and does not change; one with
    few turns distinguishes far positions and is slowed by the whole factor; between, in part. Without a first length,
    all are slowed by the same factor.

    Attributes:
        factor: The divisor of the slowed frequencies, at least 1.
        length: Positions of a row first trained on; 0 = the same factor for all.
        slow_turns: The turns in such a row up to which a frequency is slowed by the whole factor.
        fast_turns: The turns from which it is not slowed.

    Sources: Chen et al. 2023, "Extending Context Window of Large Language Models via Positional Interpolation" (one
    factor); Peng et al. 2023, "YaRN", section 3.2 (in part); Llama 3.1 (its turns, 1 and 4).
    """

    factor: float
    length: int
    slow_turns: float
    fast_turns: float

    def apply(self, frequency_k: Array) -> Array:
        """Returns the slowed frequencies, in radians per position."""
        if not self.length:
            return frequency_k / self.factor
        turns_k = frequency_k * (self.length / (2 * jnp.pi))
        kept_k = jnp.clip((turns_k - self.slow_turns) / (self.fast_turns - self.slow_turns), 0.0, 1.0)
        return frequency_k * (kept_k + (1 - kept_k) / self.factor)


def rotate(x_BLHK: Array, base: float, position: Array | None = None, slowing: Slowing | None = None) -> Array:
    """Rotates the pairs (k, k + K/2) of each head by the position times a frequency that falls with k.

    The product of a rotated query and a rotated key then depends only on the distance between their positions.

    Args:
        x_BLHK: Queries or keys, (B, L, heads, K) with K even, of any float dtype.
        base: The frequencies are base ** (-2k / K).
        position: int32, (L,) or (B, L): the position of each, on a device with a part of a row's positions, or in a row
            of several documents; None for 0 to L - 1.
        slowing: The slowing of frequencies, if any.

    Returns:
        The rotated array, of the same shape and dtype; computed in float32 or wider.
    """
    wide = jnp.promote_types(x_BLHK.dtype, jnp.float32)
    length, half = x_BLHK.shape[1], x_BLHK.shape[3] // 2
    frequency_k = base ** (-jnp.arange(half, dtype=wide) / half)
    if slowing is not None:
        frequency_k = slowing.apply(frequency_k)
    if position is None:
        position = jnp.arange(length, dtype=wide)
    angle = position.astype(wide)[..., None] * jnp.expand_dims(frequency_k, range(position.ndim))
    cos, sin = (function(angle).reshape(-1, length, 1, half) for function in (jnp.cos, jnp.sin))
    first, second = jnp.split(x_BLHK.astype(wide), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
    return narrow(rotated, x_BLHK.dtype)


def causal_attention(query_BLHK: Array, key_BLGK: Array, value_BLGK: Array, segment_BL: Array | None = None) -> Array:
    """Attends from each position to itself and earlier ones; query head h reads key-value head h // R.

    Scores are computed for up to four slices of the queries, each against the keys that it can see, which avoids
    up to 3/8 of the full square. Backward recomputes the scores. The R query heads of a group share one matrix
    product.

    Args:
        query_BLHK: (B, L, H, K), any float dtype.
        key_BLGK: (B, L, G, K), G a divisor of H.
        value_BLGK: (B, L, G, K).
        segment_BL: int32, (B, L): the document of each position, if rows have several; attention stays within one.

    Returns:
        (B, L, H, K) in the dtype of the query. Scores and softmax use float32 or wider.
    """
    B, L, H, K = query_BLHK.shape
    G = key_BLGK.shape[2]
    query_BGRLK = query_BLHK.reshape(B, L, G, H // G, K).transpose(0, 2, 3, 1, 4)
    key_BGLK, value_BGLK = key_BLGK.transpose(0, 2, 1, 3), value_BLGK.transpose(0, 2, 1, 3)
    size = max(MIN_SLICE, -(-L // NUM_SLICES))
    bounds = [(start, min(start + size, L)) for start in range(0, L, size)]
    slices = [
        _attend(
            *(query_BGRLK[:, :, :, start:stop], key_BGLK[:, :, :stop], value_BGLK[:, :, :stop]),
            *(() if segment_BL is None else (segment_BL[:, start:stop], segment_BL[:, :stop])),
        )
        for start, stop in bounds
    ]
    return jnp.concatenate(slices, axis=3).transpose(0, 3, 1, 2, 4).reshape(B, L, H, K)


@recompute
def _attend(query_BGRSK: Array, key_BGTK: Array, value_BGTK: Array, *segments: Array) -> Array:
    """Returns attention of the last S of T positions, (B, G, R, S, K); with segments (B, S) and (B, T), within each."""
    B, G, R, S, K = query_BGRSK.shape
    T = key_BGTK.shape[2]
    wide = jnp.promote_types(query_BGRSK.dtype, jnp.float32)
    score_BGXT = jnp.einsum(
        "BGXK,BGTK->BGXT", query_BGRSK.reshape(B, G, R * S, K), key_BGTK, preferred_element_type=wide
    )
    query_ST, key_ST = (lax.broadcasted_iota(jnp.int32, (S, T), dim) for dim in (0, 1))
    visible_ST = key_ST <= query_ST + (T - S)
    score_BGRST = score_BGXT.reshape(B, G, R, S, T) * K**-0.5
    visible_bST = visible_ST[None]
    if segments:
        segment_BS, segment_BT = segments
        visible_bST = visible_bST & (segment_BS[:, :, None] == segment_BT[:, None, :])
    score_BGRST = jnp.where(visible_bST[:, None, None], score_BGRST, jnp.finfo(wide).min)
    weight_BGXT = jax.nn.softmax(score_BGRST, axis=-1).astype(value_BGTK.dtype).reshape(B, G, R * S, T)
    return jnp.einsum("BGXT,BGTK->BGXK", weight_BGXT, value_BGTK).reshape(B, G, R, S, K)


Attention: TypeAlias = Callable[..., Array]
"""`attention(query (B, L, H, K), key (B, L, G, K), value (B, L, G, K), segments (B, L) or nothing) -> (B, L, H, K)`."""
FUSED_PLATFORMS = ("gpu", "cuda")


def choose_attention(implementation: str, platform: str) -> Attention:
    """Returns causal attention of one device.

    Args:
        implementation: `model.attention`: `auto` uses cuDNN on GPUs if it supports the arrays, `cudnn` requires it.
        platform: The platform of the mesh's devices.

    Returns:
        A function of global or per-device arrays, see `causal_attention`. With `cudnn`, it raises UserError if cuDNN
        does not support the arrays.
    """
    if implementation == "xla" or platform not in FUSED_PLATFORMS:
        return causal_attention
    return functools.partial(_fused_if_supported, implementation == "cudnn")


def _fused_if_supported(required: bool, query: Array, key: Array, value: Array, segment: Array | None = None) -> Array:
    attention = cudnn_attention if is_supported(required, query, key, value, segment) else causal_attention
    return attention(query, key, value, segment)


def cudnn_attention(query_BLHK: Array, key_BLGK: Array, value_BLGK: Array, segment_BL: Array | None = None) -> Array:
    """Applies causal attention with cuDNN, as `causal_attention` does; key-value heads are not repeated.

    Args:
        query_BLHK: (B, L, H, K), bfloat16 or float16; K is a multiple of 8, at most 128 (256 from Hopper on).
        key_BLGK: (B, L, G, K), G a divisor of H.
        value_BLGK: (B, L, G, K).
        segment_BL: int32, (B, L): the document of each position; adds a mask of (B, 1, L, L).

    Raises:
        NotImplementedError, RuntimeError, ValueError: cuDNN is missing, or does not support the arrays.
    """
    mask = None if segment_BL is None else (segment_BL[:, None, :, None] == segment_BL[:, None, None, :])
    return jax.nn.dot_product_attention(
        query_BLHK, key_BLGK, value_BLGK, mask=mask, is_causal=True, implementation="cudnn"
    )
