"""Dropout whose mask belongs to the example, not to where the example is computed."""

import zlib

import jax
import jax.numpy as jnp
from jax import Array


def dropout(x_BlD: Array, example_B: Array, position_l: Array, key: Array, *, name: str, rate: float) -> Array:
    """Sets a random part of the values to zero and scales up the others.

    Each position of each row draws its own mask, from the key, the place in the model, the row's global index and the
    position in the row. So it meets the same mask on every mesh, in every microbatch and next to any other rows.

    These four are put into the two words of a Threefry key, whose bits depend on every bit of it: one call for all
    draws. Folding one after the other into the key would take a call each, and longer to compile.

    Args:
        x_BlD: (B, l, D), per-device rows and positions.
        example_B: (B,) int32, global index of each row.
        position_l: (l,) int32, the positions in the whole row.
        key: The key of this step and this block.
        name: The place in the block.
        rate: Part of the values that is dropped, 0 <= rate < 1.

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
