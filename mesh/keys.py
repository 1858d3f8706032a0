"""Random keys of the runtime: always threefry2x32, whatever JAX's default generator is.

First parameters and masks are the same on every mesh because threefry gives the same bits however its work is split;
`JAX_DEFAULT_PRNG_IMPL=rbg` promises no such thing. A state holds the key as two words, and both ways lie here.
"""

import jax
from jax import Array

IMPLEMENTATION = "threefry2x32"
WORDS = 2
"""uint32 words of a key's raw data."""


def make_key(seed: int | Array) -> Array:
    """The key of a seed: a typed key, scalar."""
    return jax.random.key(seed, impl=IMPLEMENTATION)


def key_of(key_data: Array) -> Array:
    """The typed key of raw data, uint32 (..., 2), as `jax.random.key_data` gives it."""
    return jax.random.wrap_key_data(key_data, impl=IMPLEMENTATION)
