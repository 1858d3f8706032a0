"""The attention methods for positions split over the axis `context`, by name; implements the one with all-to-alls.

Letters: B rows, L positions of a row, l = L / N of them on one device of the axis of size N, H query heads, G key-value
heads, h = H / N and g of them on one device after the exchange, K width of a head.

In all-to-all attention (DeepSpeed Ulysses), device r has the l positions from r l on, so that the parts received from
devices 0, 1, ... are in the order of positions. Each device receives all positions of some heads, and sends the result
back.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from ...context import AXIS, ContextConfig, kv_repeats
from .ring import ring_attention


def all_to_all_attention(
    query_BlHK: Array,
    key_BlGK: Array,
    value_BlGK: Array,
    *,
    attend: Callable[[Array, Array, Array, Array | None], Array],
    implementation: str = "xla",
    config: ContextConfig,
    segment_BL: Array | None = None,
) -> Array:
    """Runs attention over all positions of a row, which are split over the axis `context`.

    One all-to-all moves queries, keys and values; key-value heads are first repeated if N does not divide their number.
    The transpose in autodiff is also an all-to-all, which moves the gradient in the opposite direction.

    Args:
        query_BlHK: The queries at this device's `local_positions`, (B, l, H, K); H must be a multiple of N.
        key_BlGK: The keys, (B, l, G, K), G a divisor of H.
        value_BlGK: The values, (B, l, G, K).
        attend: The attention of one device, `attend(query_BLhK, key_BLgK, value_BLgK, segment_BL) -> (B, L, h, K)`.
        implementation: Unused; `attend` is an implementation.
        config: The strategy's options, N = `size`.
        segment_BL: The segments of all positions, int32 (B, L), the same on all devices of the axis.

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


ATTENTION: dict[str, Callable[..., Array]] = {"ring": ring_attention, "all_to_all": all_to_all_attention}
"""Attention methods by the name in `strategy.context.attention`; all take the arguments of `all_to_all_attention`.

Their sizes and traffic are in `context.METHODS`."""
