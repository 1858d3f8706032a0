"""Dropout whose masks belong to the rows: drawn from a key of each row's own, so that no mesh changes them.

A library draws one mask for all rows that it is given. On a mesh these are a device's own rows, and the same key would
drop other values than on one device. The layers are as the library has them; only their masks are drawn here.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax


def row_keys(key: Array | None, example: Array) -> Array:
    """A key for each row, of legacy form: what a row draws depends on the step and on its index alone.

    Args:
        key: Of the step, the same on every device; None in evaluation, where it is always the same.
        example: int32 (rows,), the global index of each row.

    Returns:
        uint32 (rows, 2).
    """
    key = jax.random.key(0) if key is None else key
    return jax.vmap(lambda index: jax.random.key_data(jax.random.fold_in(key, index)))(example)


def drop(inputs: Array, rate: float, key: Array, example: Array, shared_dims: Sequence[int] = ()) -> Array:
    """Drops values and scales the others.

    Args:
        inputs: Rows on dim 0; or a multiple of them, where rows and further dims were made one.
        rate: Part of the values that is dropped, from 0 to 1.
        key: Of this layer in this step, the same on every device.
        example: int32 (rows,), the global index of each row.
        shared_dims: Dims along which a mask is the same.

    Returns:
        An array like `inputs`.
    """
    if rate == 0:
        return inputs
    if rate == 1:
        return jnp.zeros_like(inputs)
    rows, keep = example.shape[0], 1.0 - rate
    if inputs.shape[0] % rows:
        raise ValueError(
            f"dropout of an array of shape {inputs.shape} for {rows} rows: dim 0 has to be a multiple of the rows."
        )
    shape = [
        1 if dim in {each % inputs.ndim for each in shared_dims} else size for dim, size in enumerate(inputs.shape)
    ]
    of_row = (shape[0] // rows if shape[0] > 1 else 1, *shape[1:])

    def mask(index: Array) -> Array:
        return jax.random.bernoulli(jax.random.fold_in(key, index), keep, of_row)

    drawn = jax.vmap(mask)(example).reshape(rows * of_row[0], *of_row[1:])
    drawn = jnp.broadcast_to(drawn, inputs.shape)
    return lax.select(drawn, inputs / keep, jnp.zeros_like(inputs))
