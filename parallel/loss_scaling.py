"""Loss scaling: float16 holds no number under 6e-8, so that small gradients would be lost in backward as zeros.

    backward      d(scale x sum of the loss)                    every gradient of it is `scale` times as large
    gradients     / (scale x weight of the global batch)        the one division, in the dtype of the parameters
    finite        = the norm of all gradients is finite         a number that all devices have
    where finite  the update; after `interval` of them in a row, scale = 2 scale
    elsewhere     everything stays as it was, but for the step and scale = scale / 2

A loss is a sum over the rows of a device, not a mean over the batch, and so are its gradients until that division: they
are larger by the weight of the batch, and the scale that they bear is smaller by as much than one for a mean. From
2 ** 15 a run comes down to it within the first steps.

Multiplying by a power of two is exact: where nothing under- or overflows, gradients are the same bits with and without.
The scale is one number for all devices, also under local steps, where a gradient that is not finite in one group leaves
out the updates of all.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2; the rule of growth is NVIDIA's, "Train With
Mixed Precision", section "Choosing A Scaling Factor".
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .precision import Precision

LARGEST, SMALLEST = 2.0**24, 2.0**-24
"""What the scale does not go beyond."""
MOST_IN_A_ROW = 40
"""Updates in a row that a run may leave out: from 2 ** 15 to the smallest scale, and one more."""


class LossScale(NamedTuple):
    """What dynamic loss scaling keeps from step to step, in `TrainState.loss_scale`; the same on every device.

    Attributes:
        scale: float32 scalar, what the loss of the next step is multiplied by.
        good_steps: int32 scalar, updates in a row since the scale has changed.
    """

    scale: Array
    good_steps: Array


def is_dynamic(precision: Precision) -> bool:
    """Whether a state carries a scale, and updates are left out."""
    return precision.scaling == "dynamic"


def first_loss_scale(precision: Precision) -> Any:
    """The state before the first step; () where the scale is a constant, or there is none."""
    if not is_dynamic(precision):
        return ()
    return LossScale(jnp.float32(precision.loss_scale_initial), jnp.zeros((), jnp.int32))


def scale_in_force(precision: Precision, state: Any) -> Array | None:
    """The scale of one step: float32 scalar, or None where nothing is scaled.

    Args:
        precision: With the options.
        state: `TrainState.loss_scale`.
    """
    if isinstance(state, LossScale):
        return state.scale
    return None if precision.scaling == "none" else jnp.float32(precision.scaling)


def scaled(value: Array, scale: Array | None) -> Array:
    """A sum of the loss, or a divisor of its gradients, times the scale, in a dtype that holds both."""
    return value if scale is None else value * scale


def next_loss_scale(state: LossScale, finite: Array, interval: int) -> LossScale:
    """The scale after one step. Traced.

    Args:
        state: Before it.
        finite: Whether its gradients were finite, a scalar.
        interval: Updates in a row after which the scale doubles.
    """
    good = jnp.where(finite, state.good_steps + 1, 0)
    grows = good >= interval
    scale = jnp.where(finite, jnp.where(grows, state.scale * 2, state.scale), state.scale / 2)
    return LossScale(jnp.clip(scale, SMALLEST, LARGEST), jnp.where(grows, 0, good))


def where_finite(norm: Array, after: Any, before: Any) -> Any:
    """The tree `after` where the norm of the gradients is finite, else `before`. Traced.

    A choice by element: XLA joins it to what computes them.
    """
    return jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(norm), new, old), after, before)


def accept(after: Any, before: Any, state: Any, norm: Array, precision: Precision) -> tuple[Any, Any]:
    """Takes an update or leaves it out, and goes on to the next scale; without a scale, takes it. Traced.

    Args:
        after: What the update made of parameters and of the optimizer's state.
        before: What they were.
        state: `TrainState.loss_scale`.
        norm: Of all gradients, the same on all devices.
        precision: With the options.

    Returns:
        One of the two trees, and the next `TrainState.loss_scale`.
    """
    if not isinstance(state, LossScale):
        return after, state
    following = next_loss_scale(state, jnp.isfinite(norm), precision.loss_scale_interval)
    return where_finite(norm, after, before), following
