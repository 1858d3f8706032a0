"""Loss scaling for float16, which cannot represent numbers below 6e-8: small gradients would become zero in backward.

    backward      d(scale x sum of the loss)                    every gradient is `scale` times as large
    gradients     / (scale x weight of the global batch)        the one division, in the dtype of the parameters
    finite        = the norm of all gradients is finite         the same on all devices
    if finite     the update; after `interval` consecutive updates, scale = 2 scale
    if not        the state stays the same, except for the step and scale = scale / 2

The loss is a sum over the rows of a device, not a mean over the batch, and until that division its gradients are sums
too. They are larger than gradients of a mean by the weight of the batch, and the largest usable scale is smaller by the
same factor. From 2 ** 15, a run reaches that scale within the first steps.

Multiplying by a power of two is exact: if nothing under- or overflows, gradients have the same bits with and without
scaling. All devices use the same scale, also under local steps, where a gradient that is not finite in one group skips
the updates of all groups.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2; the rule of growth is NVIDIA's, "Train With
Mixed Precision", section "Choosing A Scaling Factor".
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ..options import Precision

MAX_SCALE, MIN_SCALE = 2.0**24, 2.0**-24
MAX_CONSECUTIVE_SKIPS = 40
"""Consecutive updates that a run may skip: from 2 ** 15 to the smallest scale, and one more."""


class LossScale(NamedTuple):
    """The state of dynamic loss scaling, `TrainState.loss_scale`; the same on every device.

    Attributes:
        scale: The factor of the loss in the next step, a float32 scalar.
        good_steps: The number of consecutive updates since the scale changed, an int32 scalar.
    """

    scale: Array
    good_steps: Array


def is_dynamic(precision: Precision) -> bool:
    """Returns whether the state contains a scale, so that updates may be skipped."""
    return precision.scaling == "dynamic"


def first_loss_scale(precision: Precision) -> Any:
    """Returns the initial state; () without dynamic scaling."""
    if not is_dynamic(precision):
        return ()
    return LossScale(jnp.float32(precision.loss_scale_initial), jnp.zeros((), jnp.int32))


def scale_in_force(precision: Precision, state: Any) -> Array | None:
    """Returns the scale of one step, a float32 scalar, or None without scaling.

    Args:
        precision: The options of loss scaling.
        state: `TrainState.loss_scale`.
    """
    if isinstance(state, LossScale):
        return state.scale
    return None if precision.scaling == "none" else jnp.float32(precision.scaling)


def next_loss_scale(state: LossScale, finite: Array, interval: int) -> LossScale:
    """Returns the scale after one step. Traced.

    Args:
        state: The state before the step.
        finite: Whether its gradients were finite, a scalar.
        interval: The number of consecutive updates after which the scale doubles.
    """
    good = jnp.where(finite, state.good_steps + 1, 0)
    grows = good >= interval
    scale = jnp.where(finite, jnp.where(grows, state.scale * 2, state.scale), state.scale / 2)
    return LossScale(jnp.clip(scale, MIN_SCALE, MAX_SCALE), jnp.where(grows, 0, good))


def where_finite(norm: Array, after: Any, before: Any) -> Any:
    """Returns `after` if the norm of the gradients is finite, otherwise `before`. Traced.

    It selects element by element, which XLA fuses with the computation of `after`.
    """
    return jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(norm), new, old), after, before)


def accept(after: Any, before: Any, state: Any, norm: Array, precision: Precision) -> tuple[Any, Any]:
    """Applies or skips an update, and returns the next scale; without dynamic scaling, applies it. Traced.

    Args:
        after: The parameters and the optimizer's state after the update.
        before: The parameters and the optimizer's state before the update.
        state: `TrainState.loss_scale`.
        norm: The norm of all gradients, the same on all devices.
        precision: The options of loss scaling.

    Returns:
        One of the two trees, and the next `TrainState.loss_scale`.
    """
    if not isinstance(state, LossScale):
        return after, state
    following = next_loss_scale(state, jnp.isfinite(norm), precision.loss_scale_interval)
    return where_finite(norm, after, before), following
