"""Checks dynamic loss scaling: a step that is not finite changes nothing but the scale, and the scale grows again.

Both sides compute in float64, which never overflows. So a step is made not finite: one row weighs NaN.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...layouts.paths import leaves_with_paths
from ..step.loss_scaling import LARGEST, SMALLEST, LossScale
from ..step.state import TrainState
from ..step.train_step import Step
from .differences import numbers
from .reference import HostBatch, OneDevice

WEIGHTS = "weights"


def check_loss_scale(step: Step, state: TrainState, batch: HostBatch, one_device: OneDevice) -> str | None:
    """Takes a step that is not finite, and one after which the scale has to double.

    Args:
        step: The step.
        state: Its state; it is not consumed.
        batch: A global batch.
        one_device: The one device.

    Returns:
        The first thing that is not as documented, "" if there is none; None without a dynamic scale, or if no weight
        makes the gradients of one device invalid.
    """
    scale = state.loss_scale
    if not isinstance(scale, LossScale) or not np.issubdtype(np.asarray(batch.get(WEIGHTS, 0)).dtype, np.floating):
        return None
    weights = np.array(batch[WEIGHTS])
    weights[:1] = np.nan
    invalid = {**batch, WEIGHTS: weights}
    host, kept = (jax.tree.map(np.asarray, each) for each in (state.params, state.model_state))
    gradients = jax.tree.leaves(one_device.sums(host, invalid, int(state.step), kept).gradients)
    if all(np.isfinite(leaf).all() for leaf in gradients):
        return None
    before = float(scale.scale)
    after, _ = step(_copy(state), dict(invalid))
    changed = [
        path
        for name in ("params", "opt_state", "model_state")
        for (path, new), old in zip(
            leaves_with_paths({name: getattr(after, name)}), jax.tree.leaves(getattr(state, name)), strict=True
        )
        if np.asarray(numbers(new)).tobytes() != np.asarray(numbers(old)).tobytes()
    ]
    if changed:
        return f"A step whose gradients are not finite changes {len(changed)} arrays, the first of them {changed[0]}."
    if problem := _unlike(after.loss_scale, max(before / 2, SMALLEST), 0, "whose gradients are not finite"):
        return problem
    interval = step.precision.loss_scale_interval
    grown = state._replace(loss_scale=scale._replace(good_steps=jnp.full_like(scale.good_steps, interval - 1)))
    after, _ = step(_copy(grown), dict(batch))
    return _unlike(after.loss_scale, min(before * 2, LARGEST), 0, f"that is number {interval} in a row to be finite")


def _unlike(found: LossScale, scale: float, good_steps: int, which: str) -> str:
    """The text for a scale that is not as expected; "" if it is."""
    if (float(found.scale), int(found.good_steps)) == (scale, good_steps):
        return ""
    return (
        f"After a step {which}, the loss scale is {float(found.scale):g} and {int(found.good_steps)} steps count as "
        f"finite; expected {scale:g} and {good_steps}."
    )


def _copy(state: Any) -> Any:
    return jax.tree.map(jnp.copy, state)
