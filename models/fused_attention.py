"""The choice of attention on one device: cuDNN's fused kernel on NVIDIA GPUs, or the form of `attention.py`.

The fused kernel keeps no scores: at 8,192 positions, 2 rows and 32 heads, a step of Llama-3 8B on fsdp 8 needs 22.7 GB
of temporary memory instead of 53.4 (compiled for H100s with JAX 0.10.2, November 2026; see docs/gpu.md).

Source: Dao et al. 2022, "FlashAttention"; NVIDIA, "cuDNN Frontend: scaled dot product attention".
"""

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
from jax import Array

from ..mesh.errors import UserError
from .attention import causal_attention

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
    fused = functools.partial(cudnn_attention, segment_BL=segment)
    try:
        jax.eval_shape(lambda *arrays: jax.vjp(fused, *arrays)[0], query, key, value)  # JAX's checks of both passes
    except (NotImplementedError, RuntimeError, ValueError) as error:
        if required:
            raise UserError(
                f"model.attention=cudnn: cuDNN does not support queries {query.shape} in {query.dtype}: {error} "
                "Set model.attention=auto, or precision.compute=bfloat16."
            ) from error
        return causal_attention(query, key, value, segment)
    return fused(query, key, value)


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
