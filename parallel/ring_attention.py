"""Ring attention (being written): the signature."""

from jax import Array

from .context import ContextConfig


def ring_attention(
    query_BlHK: Array,
    key_BlGK: Array,
    value_BlGK: Array,
    *,
    config: ContextConfig,
    segment_BL: Array | None = None,
) -> Array:
    """Causal attention over all positions of a row, of which each device of the axis `context` holds some.

    Args:
        query_BlHK: (B, l, H, K), per-device: the positions `local_positions` of each row, any float dtype.
        key_BlGK: (B, l, G, K), G a divisor of H.
        value_BlGK: (B, l, G, K).
        config: The strategy's options, with `size` over 1.
        segment_BL: int32, (B, L), the same on all devices of the axis: a query sees keys of its own segment alone.

    Returns:
        (B, l, H, K), per-device, in the dtype of the query.
    """
    raise NotImplementedError
