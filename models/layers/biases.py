"""Biases of products, read in backward as well as in forward.

The gradient of a sum does not need the bias, so XLA would leave out its gather in backward where FSDP splits it. Here
biases are gathered like every other parameter, which costs next to nothing. A bias of your own is gathered once, and
predicted so (`parallel/blocks/read_again.py`).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array


def add_biases(products_BLf: Sequence[Array], biases_f: Sequence[Array]) -> list[Array]:
    """Adds a bias (f,) to each product (B, L, f)."""
    return [product + bias_of(bias)[None, None, :] for product, bias in zip(products_BLf, biases_f, strict=True)]


@jax.custom_vjp
def bias_of(bias_f: Array) -> Array:
    """The bias itself; where it is not a number its gradient is none either, so backward has to look at it."""
    return bias_f


def _forward(bias_f: Array) -> tuple[Array, Array]:
    return bias_f, bias_f


def _backward(bias_f: Array, gradient_f: Array) -> tuple[Array]:
    return (jnp.where(jnp.isnan(bias_f), bias_f.astype(gradient_f.dtype), gradient_f),)


bias_of.defvjp(_forward, _backward)
