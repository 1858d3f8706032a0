"""The loss of classifiers and language models."""

import jax
import jax.numpy as jnp
from jax import Array, lax


def cross_entropy(logits: Array, targets: Array, weights: Array) -> tuple[Array, Array]:
    """Sums the weighted negative log-likelihood of the targets.

    Args:
        logits: (..., V), per-device, float32 or wider.
        targets: (...) int32, 0 <= target < V.
        weights: (...) float; 0 leaves a position out.

    Returns:
        (sum of weight * loss in nats, sum of weights): two scalars in the dtype of the logits. Whoever knows the whole
        global batch divides.
    """
    weights = weights.astype(logits.dtype)
    class_index = lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    target_logits = jnp.sum(jnp.where(class_index == targets[..., None], logits, 0.0), axis=-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - target_logits
    return jnp.sum(losses * weights), jnp.sum(weights)
