"""Attention with heads over devices (DeepSpeed Ulysses): each device gets all positions of some heads, and back.

Letters: B rows, L positions of a row, l = L / N of them on one device of the axis `context` of size N, H query heads,
G key-value heads, h = H / N and g of them on one device after the exchange, K width of a head.

Device r holds the positions from r l on, so that what arrives from devices 0, 1, ... lies in the order of positions.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from ...context import AXIS, ContextConfig, kv_repeats


def ulysses_attention(
    query_BlHK: Array,
    key_BlGK: Array,
    value_BlGK: Array,
    *,
    attend: Callable[[Array, Array, Array, Array | None], Array],
    config: ContextConfig,
    segment_BL: Array | None = None,
) -> Array:
    """Attention over all positions of a row, of which each device of the axis `context` holds some.

    Queries, keys and values travel in one all-to-all; key-value heads are repeated first where N does not divide them.
    Autodiff's transpose of an all-to-all is one: the gradient moves the same the other way.

    Args:
        query_BlHK: (B, l, H, K), per-device: the positions `local_positions` of each row; H a multiple of N.
        key_BlGK: (B, l, G, K), G a divisor of H.
        value_BlGK: (B, l, G, K).
        attend: The attention of one device, `attend(query_BLhK, key_BLgK, value_BLgK, segment_BL) -> (B, L, h, K)`.
        config: The strategy's options, N = `size`.
        segment_BL: int32, (B, L), the same on all devices of the axis; given to `attend`.

    Returns:
        (B, l, H, K), per-device.

    Source:
        Jacobs et al. 2023, "DeepSpeed Ulysses", section 3.
    """
    size = config.size
    repeats = kv_repeats(key_BlGK.shape[2], config)
    key_BlGK, value_BlGK = (jnp.repeat(x, repeats, axis=2) if repeats > 1 else x for x in (key_BlGK, value_BlGK))
    parts = [x.reshape(*x.shape[:2], size, -1, x.shape[3]) for x in (query_BlHK, key_BlGK, value_BlGK)]
    h, g = parts[0].shape[3], parts[1].shape[3]
    heads = lax.all_to_all(jnp.concatenate(parts, axis=3), AXIS, split_axis=2, concat_axis=1, tiled=True)
    query_BLhK, key_BLgK, value_BLgK = jnp.split(heads.squeeze(2), (h, h + g), axis=2)
    mixed_BLhK = attend(query_BLhK, key_BLgK, value_BLgK, segment_BL)
    return lax.all_to_all(mixed_BLhK, AXIS, split_axis=1, concat_axis=2, tiled=True)
