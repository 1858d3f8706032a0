"""What a fault of a device's memory does: one bit of its own copy of an array is another."""

from typing import Any

import jax
import numpy as np


def flip_bit(array: jax.Array, device: Any, *, byte: int = 0, bit: int = 0) -> jax.Array:
    """The same array, but for one bit of what one device holds of it.

    Args:
        array: On any mesh.
        device: One that this process holds.
        byte: In that device's part.
        bit: In that byte.
    """
    parts = []
    for shard in array.addressable_shards:
        part = shard.data
        if shard.device == device:
            values = np.array(part)
            content = bytearray(values.tobytes())
            content[byte] ^= 1 << bit
            changed = np.frombuffer(bytes(content), values.dtype).reshape(values.shape)
            part = jax.device_put(changed, device)
        parts.append(part)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def flip_in(tree: Any, path: str, device: Any, **where: int) -> Any:
    """The same pytree with such a bit flipped in the array of a path."""
    from spmdkit.layouts.paths import map_with_path

    return map_with_path(lambda name, leaf: flip_bit(leaf, device, **where) if name == path else leaf, tree)
