"""Loss scaling for float16, which cannot represent numbers below 6e-8: small gradients would become zero in backward.

    backward      d(scale x sum of the loss)                    every gradient is `scale` times as large
    gradients     / (scale x weight of the global batch)        the one division, in the dtype of the parameters
    finite        = loss and norm of all gradients are finite   the same on all devices
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
from .skipping import skipped
from .state import StepMetrics

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


class Carried(NamedTuple):
    """What an update changes; `accept` keeps all of it or nothing.

    Attributes:
        params: The parameters, or the copies of local steps.
        opt_state: The optimizer's state.
        errors: The errors of compression, or ().
        model_state: The model's state, or ().
    """

    params: Any
    opt_state: Any
    errors: Any = ()
    model_state: Any = ()


def loss_to_follow(loss: Array, metrics: StepMetrics) -> Array:
    """Returns the loss for the optimizer: NaN if the step is not finite, so that `skip_not_finite` skips it.

    Args:
        loss: The loss of all rows; under local steps, (groups,), that of each group.
        metrics: The metrics of the step, the same on all devices.
    """
    return jnp.where(is_finite(metrics), loss, jnp.nan)


def is_finite(metrics: StepMetrics) -> Array:
    """Returns whether the loss and the norm of a step are finite, by which runs report it as skipped. Traced."""
    return jnp.isfinite(metrics.loss) & jnp.isfinite(metrics.grad_norm)


def accept(
    after: Carried, before: Carried, state: Any, metrics: StepMetrics, precision: Precision
) -> tuple[Carried, Any]:
    """Applies or skips an update, and returns the next scale. Traced.

    It selects element by element, which XLA fuses with the computation of `after`.

    Args:
        after: The state after the update.
        before: The state before the update.
        state: `TrainState.loss_scale`.
        metrics: The metrics of the step, the same on all devices.
        precision: The options of loss scaling.

    Returns:
        One of the two states, and the next `TrainState.loss_scale`. If the optimizer counts skipped updates, it has
        decided, and its own state counts.
    """

    def where(accepted: Array, new: Any, old: Any) -> Any:
        return jax.tree.map(lambda leaf, kept: jnp.where(accepted, leaf, kept), new, old)

    finite = is_finite(metrics)
    if isinstance(state, LossScale):
        following = next_loss_scale(state, finite, precision.loss_scale_interval)
        return where(finite, after, before), following
    if not jax.tree.leaves((after.errors, after.model_state)):
        return after, state
    counted, counted_before = skipped(after.opt_state), skipped(before.opt_state)
    if counted is None or counted_before is None:
        return after._replace(model_state=where(finite, after.model_state, before.model_state)), state
    accepted = counted == counted_before
    errors = where(accepted, after.errors, before.errors)
    model_state = where(accepted, after.model_state, before.model_state)
    return after._replace(errors=errors, model_state=model_state), state
