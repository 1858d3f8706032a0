"""Initial parameters: a function of the seed and the parameter's name, never of the mesh."""

import zlib

import jax
import jax.numpy as jnp
from jax import Array

STD_OF_TRUNCATED = 0.87962566103423978
"""Standard deviation of a standard normal cut off at -2 and 2."""


def named_key(key: Array, name: str) -> Array:
    """A key for one purpose; it stays the same when other purposes come or go."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def truncated_normal(key: Array, name: str, shape: tuple[int, ...], std: float) -> Array:
    """Draws one parameter, no value further than two (untruncated) deviations from 0.

    Args:
        key: The key of the whole model or of one of its blocks.
        name: The parameter's name within it.
        shape: Its shape.
        std: Standard deviation of what is drawn.

    Returns:
        A float32 array; whatever its layout under `jit`, the bits are the same.
    """
    drawn = jax.random.truncated_normal(named_key(key, name), -2.0, 2.0, shape, jnp.float32)
    return drawn * jnp.float32(std / STD_OF_TRUNCATED)
