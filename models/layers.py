"""Layers that models share: small functions of one device's arrays, without collectives.

Initial parameters are a function of the seed and the parameter's name, never of the mesh; dropout masks belong to the
example. Norms over the last dim use float32 or wider, and return the dtype of their input.

`bias_of`: the gradient of a sum does not need the bias, so XLA would leave out its gather in backward if FSDP splits
it. Here biases are gathered like every other parameter, at almost no cost. A bias in a user's model is gathered once,
and the predicted traffic says so (`parallel/blocks/backward_gathers.py`).

Sources: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"; Ba et al. 2016, "Layer Normalization".
"""

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, ad_checkpoint, lax

STD_OF_TRUNCATED = 0.87962566103423978
"""Standard deviation of a standard normal cut off at -2 and 2."""


def truncated_normal(key: Array, name: str, shape: tuple[int, ...], std: float) -> Array:
    """Draws one parameter with values within two (untruncated) deviations of 0.

    Args:
        key: The key of the model or of one of its blocks.
        name: The parameter's name within it.
        shape: Its shape.
        std: Standard deviation of the values.

    Returns:
        A float32 array, the same bits in every layout under `jit`.
    """
    own_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
    drawn = jax.random.truncated_normal(own_key, -2.0, 2.0, shape, jnp.float32)
    return drawn * jnp.float32(std / STD_OF_TRUNCATED)


def add_biases(products_BLf: Sequence[Array], biases_f: Sequence[Array]) -> list[Array]:
    """Adds a bias (f,) to each product (B, L, f)."""
    return [product + bias_of(bias)[None, None, :] for product, bias in zip(products_BLf, biases_f, strict=True)]


@jax.custom_vjp
def bias_of(bias_f: Array) -> Array:
    """Returns the bias; if it is NaN its gradient is NaN too, so backward must read it."""
    return bias_f


def _forward(bias_f: Array) -> tuple[Array, Array]:
    return bias_f, bias_f


def _backward(bias_f: Array, gradient_f: Array) -> tuple[Array]:
    return (jnp.where(jnp.isnan(bias_f), bias_f.astype(gradient_f.dtype), gradient_f),)


bias_of.defvjp(_forward, _backward)


def cross_entropy(logits: Array, targets: Array, weights: Array) -> tuple[Array, Array]:
    """Sums the weighted negative log-likelihood of the targets.

    Args:
        logits: (..., V), per-device, float32 or wider.
        targets: (...) int32, 0 <= target < V.
        weights: (...) float; 0 leaves a position out.

    Returns:
        (sum of weight * loss in nats, sum of weights): two scalars in the dtype of the logits. The runtime divides by
        the weight of the global batch.
    """
    weights = weights.astype(logits.dtype)
    class_index = lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    target_logits = jnp.sum(jnp.where(class_index == targets[..., None], logits, 0.0), axis=-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - target_logits
    return jnp.sum(losses * weights), jnp.sum(weights)


def dropout(x_BlD: Array, example_B: Array, position_l: Array, key: Array, *, name: str, rate: float) -> Array:
    """Sets a random part of the values to zero and scales up the others.

    Each position of each row draws its own mask, from the key, the name, the row's global index and the position in the
    row. So the mask is the same on every mesh, in every microbatch and next to any other rows.

    These four become the two words of a Threefry key, and every drawn bit depends on every bit of the key: one call for
    all draws. Folding one after the other into the key would take several calls, and longer to compile.

    Args:
        x_BlD: (B, l, D), per-device rows and positions.
        example_B: (B,) int32, global index of each row.
        position_l: (l,) int32, the positions in the whole row.
        key: The key of this step and this block.
        name: The name of the place in the block.
        rate: The fraction of the values to drop, 0 <= rate < 1.

    Returns:
        An array like `x_BlD`.

    Source:
        Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Threefry, keyed and counted).
    """
    place, row = jax.random.key_data(key)[:2] ^ jnp.asarray([zlib.crc32(name.encode()), 0], jnp.uint32)
    words = place ^ position_l.astype(jnp.uint32), row ^ example_B[:, None].astype(jnp.uint32)
    key_Bl = jax.random.wrap_key_data(jnp.stack(jnp.broadcast_arrays(*words), axis=-1), impl="threefry2x32")

    def kept(own: Array) -> Array:
        return jax.random.bernoulli(own, jnp.float32(1.0 - rate), x_BlD.shape[2:])  # the same with 64-bit types on

    return jnp.where(jax.vmap(jax.vmap(kept))(key_Bl), x_BlD / (1.0 - rate), 0.0).astype(x_BlD.dtype)


def recompute(function: Callable[..., Array]) -> Callable[..., Array]:
    """Wraps a function so that backward keeps only its arguments and recomputes the rest.

    `jax.checkpoint` does the same, but a policy on an outer `jax.checkpoint` (of a block whose parameters are gathered)
    looks inside an inner one and keeps values inside it. A function with its own gradient stays closed.

    Args:
        function: Takes arrays by position, all differentiable, and returns one.

    Returns:
        The same function; its gradient runs it again.
    """

    @jax.custom_vjp
    @functools.wraps(function)
    def call(*arguments: Array) -> Array:
        return function(*arguments)

    def forward(*arguments: Array) -> tuple[Array, tuple[Array, ...]]:
        return function(*arguments), arguments

    def backward(arguments: tuple[Array, ...], gradient: Array) -> Any:
        return jax.vjp(function, *arguments)[1](gradient)

    call.defvjp(forward, backward)
    return call


def narrow(x: Array, dtype: Any) -> Array:
    """Casts a result of float32 arithmetic; backward keeps the cast value under remat `none`, not the wider one."""
    return ad_checkpoint.checkpoint_name(x.astype(dtype), "narrowed")


def head_norm(x_BLhK: Array, scale_K: Array, epsilon: float) -> Array:
    """Applies an RMSNorm to each head; all share one scale."""
    B, _, _, K = x_BLhK.shape
    return rms_norm(x_BLhK.reshape(B, -1, K), scale_K, epsilon).reshape(x_BLhK.shape)


def rms_norm(x_BLD: Array, scale_D: Array, epsilon: float) -> Array:
    """Divides by the root of the mean square over the last dim."""
    return recompute(functools.partial(_rms_norm, epsilon=epsilon))(x_BLD, scale_D)


def layer_norm(x_BLD: Array, scale_D: Array, bias_D: Array, epsilon: float) -> Array:
    """Subtracts the mean over the last dim and divides by the deviation; then scales, and adds the bias."""
    return recompute(functools.partial(_layer_norm, epsilon=epsilon))(x_BLD, scale_D, bias_of(bias_D))


def _rms_norm(x_BLD: Array, scale_D: Array, *, epsilon: float) -> Array:
    wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
    x = x_BLD.astype(wide)
    normed = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
    return narrow(normed * scale_D.astype(wide)[None, None, :], x_BLD.dtype)


def _layer_norm(x_BLD: Array, scale_D: Array, bias_D: Array, *, epsilon: float) -> Array:
    wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
    x = x_BLD.astype(wide)
    x -= jnp.mean(x, axis=-1, keepdims=True)
    normed = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
    return narrow(normed * scale_D.astype(wide)[None, None, :] + bias_D.astype(wide)[None, None, :], x_BLD.dtype)
