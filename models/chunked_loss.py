"""The cross-entropy of a large vocabulary, computed for some positions at a time, so that logits are never held whole.

Logits of 16,384 positions over 128,256 tokens take 8.4 GB in float32, and their gradient as much again. Here, the
forward pass takes one chunk of positions after the other: logits, loss, and at once the gradients with respect to the
hidden values and the table. The loss is a sum, so backward only multiplies them by its own cotangent, and nothing is
computed twice.

Source: Hsu et al. 2024, "Liger Kernel: Efficient Triton Kernels for LLM Training", section 3.2 (gradients of a chunk in
the forward pass).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..mesh.axes import divisors
from ..parallel.collectives import varying_zeros
from ..parallel.sharding.named_outputs import name_output
from .layers import cross_entropy

MAX_LOGITS_BYTES = 1 << 30
"""Logits of one chunk in float32: 8 chunks for 16,384 positions over 128,256 tokens."""


def count_chunks(rows: int, length: int, vocabulary: int, dtype: Any) -> int:
    """Returns the number of chunks of positions in which a loss is computed; 1 keeps the logits whole.

    Args:
        rows: Rows on one device.
        length: Positions of a row on one device.
        vocabulary: The number of tokens.
        dtype: The compute dtype. float16 is never chunked: gradients before the loss scale would underflow.
    """
    if dtype == jnp.float16:
        return 1
    needed = rows * length * vocabulary * jnp.promote_types(dtype, jnp.float32).itemsize / MAX_LOGITS_BYTES
    return next(number for number in (*divisors(length), length) if number >= min(needed, length))


def chunked_cross_entropy(
    x_BLD: Array, table_DV: Array, targets_BL: Array, weights_BL: Array, num_chunks: int
) -> tuple[Array, Array]:
    """Returns the cross-entropy of `x @ table`, as `cross_entropy` of the whole logits.

    Gradients of logits are in the compute dtype, and those of the table are summed in float32 (or wider).

    Args:
        x_BLD: Hidden values, (B, L, D), per-device.
        table_DV: The table, (D, V), in the same dtype; varies over the same mesh axes.
        targets_BL: (B, L) int32.
        weights_BL: (B, L) float.
        num_chunks: A divisor of L.

    Returns:
        (sum of weight * loss in nats, sum of weights), in float32 or wider.
    """
    wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
    weights_BL = weights_BL.astype(wide)
    chunks = [_in_chunks(each, num_chunks) for each in (x_BLD, targets_BL, weights_BL)]
    return _total_loss(chunks[0], table_DV, chunks[1], chunks[2]), jnp.sum(weights_BL)


def _in_chunks(array_BLX: Array, num_chunks: int) -> Array:
    """Returns (number of chunks, B, positions of a chunk, ...)."""
    B, L, *rest = array_BLX.shape
    return jnp.moveaxis(array_BLX.reshape(B, num_chunks, L // num_chunks, *rest), 1, 0)


@jax.custom_vjp
def _total_loss(x_NBlD: Array, table_DV: Array, targets_NBl: Array, weights_NBl: Array) -> Array:
    def add(total: Array, chunk: tuple[Array, ...]) -> tuple[Array, None]:
        x_BlD, targets_Bl, weights_Bl = chunk
        return total + cross_entropy(_logits(x_BlD, table_DV), targets_Bl, weights_Bl)[0], None

    zero = varying_zeros((), weights_NBl.dtype, (x_NBlD, table_DV, targets_NBl, weights_NBl))
    return lax.scan(add, zero, (x_NBlD, targets_NBl, weights_NBl))[0]


def _logits(x_BlD: Array, table_DV: Array) -> Array:
    wide = jnp.promote_types(x_BlD.dtype, jnp.float32)
    return name_output(jnp.einsum("BlD,DV->BlV", x_BlD, table_DV, preferred_element_type=wide), "head/output")


def _forward(x_NBlD: Array, table_DV: Array, targets_NBl: Array, weights_NBl: Array) -> tuple[Array, Any]:
    wide = weights_NBl.dtype
    inputs = (x_NBlD, table_DV, targets_NBl, weights_NBl)

    def add(carry: tuple[Array, Array], chunk: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        total, dtable_DV = carry
        x_BlD, targets_Bl, weights_Bl = chunk
        loss, dlogits_BlV = jax.value_and_grad(lambda logits: cross_entropy(logits, targets_Bl, weights_Bl)[0])(
            _logits(x_BlD, table_DV)
        )
        dlogits_BlV = dlogits_BlV.astype(x_BlD.dtype)
        dx_BlD = jnp.einsum("BlV,DV->BlD", dlogits_BlV, table_DV)
        dtable_DV += jnp.einsum("BlD,BlV->DV", x_BlD, dlogits_BlV, preferred_element_type=wide)
        return (total + loss, dtable_DV), dx_BlD

    start = varying_zeros((), wide, inputs), varying_zeros(table_DV.shape, wide, inputs)
    (total, dtable_DV), dx_NBlD = lax.scan(add, start, (x_NBlD, targets_NBl, weights_NBl))
    return total, (dx_NBlD, dtable_DV, table_DV[:0], targets_NBl, weights_NBl)


def _backward(saved: Any, gradient: Array) -> tuple[Any, ...]:
    dx_NBlD, dtable_DV, like, targets_NBl, weights_NBl = saved
    return (
        (dx_NBlD * gradient).astype(dx_NBlD.dtype),
        (dtable_DV * gradient).astype(like.dtype),
        jnp.zeros(targets_NBl.shape, jax.dtypes.float0),
        jnp.zeros_like(weights_NBl),
    )


_total_loss.defvjp(_forward, _backward)
