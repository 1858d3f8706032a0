"""Dropout whose mask belongs to the example, not to where the example is computed."""

import jax
import jax.numpy as jnp
from jax import Array

from .initializers import named_key


def dropout(x_BlD: Array, example_B: Array, position_l: Array, key: Array, *, name: str, rate: float) -> Array:
    """Sets a random part of the values to zero and scales up the others.

    Each position of each row draws its own mask, from the key, the place in the model, the row's global index and the
    position in the row. So it meets the same mask on every mesh, in every microbatch and next to any other rows.

    Args:
        x_BlD: (B, l, D), per-device rows and positions.
        example_B: (B,) int32, global index of each row.
        position_l: (l,) int32, the positions in the whole row.
        key: The key of this step and this block.
        name: The place in the block.
        rate: Part of the values that is dropped, 0 <= rate < 1.

    Returns:
        An array like `x_BlD`.
    """
    place = named_key(key, name)

    def kept(example: Array, position: Array) -> Array:
        own = jax.random.fold_in(jax.random.fold_in(place, example), position)
        return jax.random.bernoulli(own, jnp.float32(1.0 - rate), x_BlD.shape[2:])  # the same with 64-bit types on

    of_row = jax.vmap(kept, in_axes=(None, 0))
    kept_BlD = jax.vmap(of_row, in_axes=(0, None))(example_B, position_l)
    return jnp.where(kept_BlD, x_BlD / (1.0 - rate), 0.0).astype(x_BlD.dtype)
