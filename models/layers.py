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

from ..mesh.axes import divisors
from ..parallel.collectives import varying_zeros
from ..parallel.sharding.named_outputs import name_output

STD_OF_TRUNCATED = 0.87962566103423978
"""Standard deviation of a standard normal cut off at -2 and 2."""
MIN_LOGITS_BYTES = 1 << 26
"""Smaller logits stay whole, and so does their gradient, in float32."""
MAX_LOGITS_BYTES = 1 << 30
"""Logits of one chunk in float32: 8 chunks for 16,384 positions over 128,256 tokens."""
ALIGNED, PADDED = 8, 128
"""GPUs are slow if the rows of a matrix are not a multiple of 16 bytes, so tables of other numbers of tokens are padded
to a multiple of 128. With 50,257 tokens, a step of GPT-2 124M took 121 ms, of which 43 in the loss, and takes 85 ms now
(H100, JAX 0.11.2, 2026-11-26)."""


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


def _bias_backward(bias_f: Array, gradient_f: Array) -> tuple[Array]:
    return (jnp.where(jnp.isnan(bias_f), bias_f.astype(gradient_f.dtype), gradient_f),)


bias_of.defvjp(lambda bias_f: (bias_f, bias_f), _bias_backward)


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


def count_chunks(rows: int, length: int, vocabulary: int, dtype: Any) -> int:
    """Returns the number of chunks of positions in which `chunked_cross_entropy` computes a loss; 0 to not use it.

    Args:
        rows: Rows on one device.
        length: Positions of a row on one device; along `tensor`, those that it keeps between products.
        vocabulary: The number of tokens.
        dtype: The compute dtype. float16 is never chunked: gradients before the loss scale would underflow.
    """
    size = rows * length * vocabulary * jnp.promote_types(dtype, jnp.float32).itemsize
    if jnp.dtype(dtype) == jnp.float16 or size < MIN_LOGITS_BYTES:
        return 0
    needed = min(size / MAX_LOGITS_BYTES, length)
    return next(number for number in divisors(length) if number >= needed)


def chunked_cross_entropy(
    x_BLD: Array,
    table_DV: Array,
    targets_BL: Array,
    weights_BL: Array,
    num_chunks: int,
    loss: Callable[[Array, Array, Array], tuple[Array, Array]] = cross_entropy,
) -> tuple[Array, Array]:
    """Returns the cross-entropy of `x @ table`, as `cross_entropy` of the whole logits, which are never held whole.

    Logits of 16,384 positions over 128,256 tokens take 8.4 GB in float32, and their gradient as much again. The forward
    pass takes one chunk of positions after the other: logits, loss, and at once the gradients with respect to the
    hidden values and the table. The loss is a sum, so backward only multiplies them by its own cotangent, and nothing
    is computed twice. Gradients of logits are in the compute dtype, those of the table are summed in float32 or wider.

    Args:
        x_BLD: Hidden values, (B, L, D), per-device.
        table_DV: The table, (D, V), in the same dtype; varies over the same mesh axes.
        targets_BL: (B, L) int32.
        weights_BL: (B, L) float.
        num_chunks: A divisor of L.
        loss: The sums of the loss and the weights of one chunk, from its logits, targets and weights.

    Returns:
        (sum of weight * loss in nats, sum of weights), in float32 or wider.

    Source:
        Hsu et al. 2024, "Liger Kernel: Efficient Triton Kernels for LLM Training", section 3.2 (gradients of a chunk in
        the forward pass).
    """
    weights_BL = weights_BL.astype(jnp.promote_types(x_BLD.dtype, jnp.float32))
    x_NBlD, targets_NBl, weights_NBl = (_in_chunks(each, num_chunks) for each in (x_BLD, targets_BL, weights_BL))
    V = table_DV.shape[1]

    def loss_of(logits_BlP: Array, *chunk: Array) -> tuple[Array, Array]:
        return loss(logits_BlP[..., :V], *chunk)

    table_DP = jnp.pad(table_DV, ((0, 0), (0, -V % PADDED))) if V % ALIGNED else table_DV
    return _total_loss(loss_of, x_NBlD, table_DP, targets_NBl, weights_NBl)


def _in_chunks(array_BLX: Array, num_chunks: int) -> Array:
    """Returns (number of chunks, B, positions of a chunk, ...)."""
    B, L, *rest = array_BLX.shape
    return jnp.moveaxis(array_BLX.reshape(B, num_chunks, L // num_chunks, *rest), 1, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total_loss(
    loss: Callable[..., tuple[Array, Array]], x_NBlD: Array, table_DV: Array, targets_NBl: Array, weights_NBl: Array
) -> tuple[Array, Array]:
    def add(sums: tuple[Array, Array], chunk: tuple[Array, ...]) -> tuple[tuple[Array, Array], None]:
        x_BlD, targets_Bl, weights_Bl = chunk
        total, weight = loss(_logits(x_BlD, table_DV), targets_Bl, weights_Bl)
        return (sums[0] + total, sums[1] + weight), None

    zero = varying_zeros((), weights_NBl.dtype, (x_NBlD, table_DV, targets_NBl, weights_NBl))
    return lax.scan(add, (zero, zero), (x_NBlD, targets_NBl, weights_NBl))[0]


def _logits(x_BlD: Array, table_DV: Array) -> Array:
    wide = jnp.promote_types(x_BlD.dtype, jnp.float32)
    return name_output(jnp.einsum("BlD,DV->BlV", x_BlD, table_DV, preferred_element_type=wide), "head/output")


def _loss_and_gradients(
    loss: Callable[..., tuple[Array, Array]], x_NBlD: Array, table_DV: Array, targets_NBl: Array, weights_NBl: Array
) -> tuple[tuple[Array, Array], Any]:
    wide, inputs = weights_NBl.dtype, (x_NBlD, table_DV, targets_NBl, weights_NBl)

    def add(carry: tuple[Array, ...], chunk: tuple[Array, ...]) -> tuple[tuple[Array, ...], Array]:
        total, weight, dtable_DV = carry
        x_BlD, targets_Bl, weights_Bl = chunk
        differentiate = jax.value_and_grad(lambda logits: loss(logits, targets_Bl, weights_Bl), has_aux=True)
        (new_total, new_weight), dlogits_BlV = differentiate(_logits(x_BlD, table_DV))
        dlogits_BlV = dlogits_BlV.astype(x_BlD.dtype)
        dx_BlD = jnp.einsum("BlV,DV->BlD", dlogits_BlV, table_DV)
        dtable_DV += jnp.einsum("BlD,BlV->DV", x_BlD, dlogits_BlV, preferred_element_type=wide)
        return (total + new_total, weight + new_weight, dtable_DV), dx_BlD

    zero = varying_zeros((), wide, inputs)
    start = zero, zero, varying_zeros(table_DV.shape, wide, inputs)
    (total, weight, dtable_DV), dx_NBlD = lax.scan(add, start, (x_NBlD, targets_NBl, weights_NBl))
    return (total, weight), (dx_NBlD, dtable_DV, table_DV[:0], targets_NBl, weights_NBl)


def _scaled_gradients(_: Any, saved: Any, gradients: tuple[Array, Array]) -> tuple[Any, ...]:
    dx_NBlD, dtable_DV, like, targets_NBl, weights_NBl = saved
    return (
        (dx_NBlD * gradients[0]).astype(dx_NBlD.dtype),
        (dtable_DV * gradients[0]).astype(like.dtype),
        jnp.zeros(targets_NBl.shape, jax.dtypes.float0),
        jnp.zeros_like(weights_NBl),
    )


_total_loss.defvjp(_loss_and_gradients, _scaled_gradients)


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
