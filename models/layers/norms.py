"""Norms over the last dim: RMSNorm and LayerNorm; in float32 or wider, given back in the dtype of what comes in.

Sources: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"; Ba et al. 2016, "Layer Normalization".
"""

import functools

import jax.numpy as jnp
from jax import Array, lax

from ...parallel.model import Params
from ..recompute import recompute
from ..transformer_config import TransformerConfig
from .biases import bias_of


def norm(config: TransformerConfig, x_BLD: Array, params: Params) -> Array:
    """The norm that a config asks for, with the parameters `norm` (D,) and, of a LayerNorm, `norm_bias` (D,)."""
    if config.norm == "rms":
        return rms_norm(x_BLD, params["norm"], config.norm_epsilon)
    return layer_norm(x_BLD, params["norm"], params["norm_bias"], config.norm_epsilon)


def head_norm(x_BLhK: Array, scale_K: Array, epsilon: float) -> Array:
    """An RMSNorm of each head by itself; all share one scale."""
    B, _, _, K = x_BLhK.shape
    return rms_norm(x_BLhK.reshape(B, -1, K), scale_K, epsilon).reshape(x_BLhK.shape)


def rms_norm(x_BLD: Array, scale_D: Array, epsilon: float) -> Array:
    """Divides by the root of the mean square over the last dim."""
    return recompute(functools.partial(_rms_norm, epsilon=epsilon))(x_BLD, scale_D)


def layer_norm(x_BLD: Array, scale_D: Array, bias_D: Array, epsilon: float) -> Array:
    """Takes the mean over the last dim away and divides by the deviation; then scales, and adds the bias."""
    return recompute(functools.partial(_layer_norm, epsilon=epsilon))(x_BLD, scale_D, bias_of(bias_D))


def _rms_norm(x_BLD: Array, scale_D: Array, *, epsilon: float) -> Array:
    wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
    x = x_BLD.astype(wide)
    normed = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
    return (normed * scale_D.astype(wide)[None, None, :]).astype(x_BLD.dtype)


def _layer_norm(x_BLD: Array, scale_D: Array, bias_D: Array, *, epsilon: float) -> Array:
    wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
    x = x_BLD.astype(wide)
    x -= jnp.mean(x, axis=-1, keepdims=True)
    normed = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
    return (normed * scale_D.astype(wide)[None, None, :] + bias_D.astype(wide)[None, None, :]).astype(x_BLD.dtype)
