"""Random keys of the runtime: always threefry2x32, whatever JAX's default generator is.

First parameters and masks are the same on every mesh because threefry gives the same bits however its work is split;
`JAX_DEFAULT_PRNG_IMPL=rbg` does not guarantee this. A state stores the key as two words.
"""

import jax
from jax import Array

from .errors import UserError

IMPLEMENTATION = "threefry2x32"
WORDS = 2
"""uint32 words of a key's raw data."""

MAX_SEED = 2**32 - 1
"""JAX uses only the lower 32 bits of a seed unless 64-bit types are enabled: larger seeds would repeat keys."""


def make_key(seed: int | Array) -> Array:
    """Returns the typed scalar key of a seed."""
    return jax.random.key(seed, impl=IMPLEMENTATION)


def key_of(key_data: Array) -> Array:
    """Returns the typed key of raw data, uint32 (..., 2), the result of `jax.random.key_data`."""
    return jax.random.wrap_key_data(key_data, impl=IMPLEMENTATION)


def check_seed(seed: int) -> None:
    """Raises a UserError if a seed is out of range."""
    if not 0 <= seed <= MAX_SEED:
        raise UserError(f"seed={seed} must be from 0 to 2**32 - 1 = {MAX_SEED}: random keys use 32 bits of a seed.")
