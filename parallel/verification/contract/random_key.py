"""The random number generator of the contract check: few operations, so that programs compile quickly.

The contract needs numbers of the right distribution that depend on nothing but key and shape; it does not need the
numbers of training. To compile 27 draws of threefry takes 2.6 s of processor on CPU, with this generator 0.8 s.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.random import define_prng_impl

_UNSIGNED = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}


def check_key(key: Array) -> Array:
    """Returns a key of this generator for any other key: a scalar of two words, as in threefry."""
    words = jax.random.key_data(key).reshape(-1)[-2:]
    return jax.random.wrap_key_data(words, impl=_IMPLEMENTATION)


def _mix(words: Array) -> Array:
    """Spreads every bit of 32 over all of them (the "lowbias32" constants of C. Wellons, 2018)."""
    words = (words ^ (words >> 16)) * jnp.uint32(0x7FEB352D)
    words = (words ^ (words >> 15)) * jnp.uint32(0x846CA68B)
    return words ^ (words >> 16)


def _counted(key: Array, shape: tuple[int, ...], stream: int) -> Array:
    """Returns one word for each element of a shape."""
    counts = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    return _mix(_mix(counts ^ key[0] ^ jnp.uint32(stream)) + key[1])


def _seed(seed: Array) -> Array:
    words = jnp.stack([jnp.uint32(0), seed.astype(jnp.uint32)])
    return _mix(words + jnp.uint32(1))


def _random_bits(key: Array, bits: int, shape: tuple[int, ...]) -> Array:
    words = _counted(key, shape, 1).astype(_UNSIGNED[bits])
    return words | (_counted(key, shape, 2).astype(jnp.uint64) << 32) if bits == 64 else words


def _split(key: Array, shape: tuple[int, ...]) -> Array:
    return jnp.stack([_counted(key, shape, 3), _counted(key, shape, 4)], axis=-1)


def _fold_in(key: Array, data: Any) -> Array:
    return _mix(key ^ _mix(data.astype(jnp.uint32) + jnp.uint32(0x9E3779B9)))


_IMPLEMENTATION = define_prng_impl(
    key_shape=(2,), seed=_seed, split=_split, random_bits=_random_bits, fold_in=_fold_in, name="contract", tag="chk"
)


def shared_key(key: Array) -> Array:
    """Returns a key that draws one number for all rows and elements, for any folded-in data; see `check_key`.

    A uniform number is below 1 / 16, so that a dropout keeps everything. If a model still depends on the other rows,
    its random numbers are not the reason.
    """
    words = jax.random.key_data(key).reshape(-1)[-2:]
    return jax.random.wrap_key_data(words, impl=_SHARED)


def _first(draw: Callable[[Array, tuple[int, ...]], Array]) -> Callable[[Array, tuple[int, ...]], Array]:
    """Repeats the first number, or key, of a draw for all elements."""

    def repeat(key: Array, shape: tuple[int, ...]) -> Array:
        one = draw(key, (1,))[0]
        return jnp.broadcast_to(one, (*shape, *one.shape))

    return repeat


_SHARED = define_prng_impl(
    key_shape=(2,),
    seed=_seed,
    split=_first(_split),
    random_bits=lambda key, bits, shape: _first(lambda key, shape: _random_bits(key, bits, shape) >> 4)(key, shape),
    fold_in=lambda key, data: _fold_in(key, jnp.zeros_like(data)),
    name="shared",
    tag="shr",
)
