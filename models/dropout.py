"""Dropout whose mask belongs to the example, not to where the example is computed."""

import jax
import jax.numpy as jnp
from jax import Array

from .initializers import named_key


def dropout(x_BLD: Array, example_B: Array, key: Array, *, name: str, rate: float) -> Array:
    """Sets a random part of the values to zero and scales up the others.

    Each row draws its own mask, from the key, the place in the model and the row's global index. So a row meets the
    same mask on every mesh, in every microbatch and next to any other rows.

    Args:
        x_BLD: (B, L, D), per-device rows.
        example_B: (B,) int32, global index of each row.
        key: The key of this step and this block.
        name: The place in the block.
        rate: Part of the values that is dropped, 0 <= rate < 1.

    Returns:
        An array like `x_BLD`.
    """
    place = named_key(key, name)

    def kept(example: Array) -> Array:
        return jax.random.bernoulli(jax.random.fold_in(place, example), 1.0 - rate, x_BLD.shape[1:])

    return jnp.where(jax.vmap(kept)(example_B), x_BLD / (1.0 - rate), 0.0).astype(x_BLD.dtype)
