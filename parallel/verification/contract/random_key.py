"""The random number generators of the contract check: few operations, so that programs compile quickly.

The check needs numbers of the right distribution that depend only on key and shape, but not the same numbers as in
training. Compiling 27 draws takes 2.6 s of CPU time with threefry and 0.8 s with this generator.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.random import define_prng_impl

_UNSIGNED = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}


def check_key(key: Array) -> Array:
    """Returns a key of this generator for any other key: a scalar of two words, as in threefry."""
    return jax.random.wrap_key_data(jax.random.key_data(key).reshape(-1)[-2:], impl=_IMPLEMENTATION)


def shared_key(key: Array) -> Array:
    """Returns a key that draws one number for all rows and elements, for any folded-in data.

    A uniform number is below 1 / 16, so that dropout keeps everything. If the result of a row still depends on the
    other rows, random numbers are not the cause.
    """
    return jax.random.wrap_key_data(jax.random.key_data(key).reshape(-1)[-2:], impl=_SHARED)


def _mix(words: Array) -> Array:
    """Spreads each of 32 bits over all of them (the "lowbias32" constants of C. Wellons, 2018)."""
    words = (words ^ (words >> 16)) * jnp.uint32(0x7FEB352D)
    words = (words ^ (words >> 15)) * jnp.uint32(0x846CA68B)
    return words ^ (words >> 16)


def _generator(name: str, tag: str, *, shared: bool) -> Any:
    """Defines a generator; a shared one draws one small number for all elements."""

    def words(key: Array, shape: tuple[int, ...], stream: int) -> Array:
        counts = jnp.zeros(shape, jnp.uint32) if shared else lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
        return _mix(_mix(counts ^ key[0] ^ jnp.uint32(stream)) + key[1])

    def random_bits(key: Array, bits: int, shape: tuple[int, ...]) -> Array:
        drawn = words(key, shape, 1).astype(_UNSIGNED[bits])
        if bits == 64:
            drawn |= words(key, shape, 2).astype(jnp.uint64) << 32
        return drawn >> 4 if shared else drawn

    def fold_in(key: Array, data: Any) -> Array:
        return _mix(key ^ _mix(data.astype(jnp.uint32) * (not shared) + jnp.uint32(0x9E3779B9)))

    return define_prng_impl(
        key_shape=(2,),
        seed=lambda seed: _mix(jnp.stack([jnp.uint32(0), seed.astype(jnp.uint32)]) + jnp.uint32(1)),
        split=lambda key, shape: jnp.stack([words(key, shape, 3), words(key, shape, 4)], axis=-1),
        random_bits=random_bits,
        fold_in=fold_in,
        name=name,
        tag=tag,
    )


_IMPLEMENTATION = _generator("contract", "chk", shared=False)
_SHARED = _generator("shared", "shr", shared=True)
