"""Why parameters differ after some steps where the first gradients agree: the steps once more, one at a time.

Each step starts from the parameters that the strategy has by then. Where one device gets another loss from these, the
cause is something that depends on the step's number. Where the loss is right and the parameters after it are not, the
cause is the update, and how the parameter moved is measured.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..sharding.stored_order import stored_order
from ..step.train_step import Step
from .diagnosis import factor, how_it_differs
from .differences import leaf_errors, relative, state_errors
from .reference import HostBatch, OneDevice, Sums
from .row_counts import is_same, leaf_of


class Training(NamedTuple):
    """Steps that can be done again.

    Attributes:
        step: of the strategy.
        one_device: the one device.
        batches: one a step.
        seed: the run's.
        tolerance: of a loss.
        params_tolerance: of parameters.
    """

    step: Step
    one_device: OneDevice
    batches: Sequence[HostBatch]
    seed: int
    tolerance: float
    params_tolerance: float


def of_parameters(path: str, training: Training, losses: Sequence[float], reference: Sequence[float]) -> str:
    """Why a parameter differs after all steps.

    Args:
        path: Of the parameter.
        training: The steps.
        losses: The strategy's.
        reference: Those of one device.
    """
    late = [n for n, pair in enumerate(zip(losses, reference, strict=True)) if relative(*pair) > training.tolerance]
    when = f"the losses agree until step {late[0]}" if late else "the losses of all steps agree"
    said = f"The gradients of the first step and their norm are right, and {when}"
    step, one_device = training.step, training.one_device
    state = step.init(training.seed)
    opt_state = one_device.first_state(one_device.to_model(_host(state.params)))
    for number, batch in enumerate(training.batches):
        before = _host(state.params)
        params = one_device.to_model(before)
        sums = one_device.sums_in_order(params, batch, number, _host(state.model_state))
        state, metrics = step(state, dict(batch))
        found, expected = float(metrics.loss), sums.total / (sums.weight or 1)
        if relative(found, expected) > training.tolerance:
            return f"{said}: {_of_loss(training, params, number, found, expected)}"
        params, opt_state = one_device.update(params, opt_state, sums)
        saved = stored_order(step.plan).to_model(state)
        if leaf_errors(saved.params, params, tolerance=training.tolerance)[0].relative > training.params_tolerance:
            off = state_errors(saved.opt_state, opt_state, params, tolerance=training.tolerance)[:1]
            arrays = (_leaf(tree, path) for tree in (one_device.to_model(before), saved.params, params))
            said = f"{said}, so it is the update: {_of_update(path, *arrays)}"
            if off and off[0].relative > training.params_tolerance:
                said += f" Of the optimizer's state, {off[0].path} is off by {off[0].relative:.1e}."
            return said
    return f"{said}; each update alone is that of one device."


def _of_loss(training: Training, params: Any, number: int, found: float, expected: float) -> str:
    """Why the loss of a later step differs from that of one device, at the same parameters."""
    said = f"at the same parameters, the loss of step {number} is {found:.8g}, and {expected:.8g} on one device."
    for other in range(number):
        sums: Sums = training.one_device.sums_in_order(params, training.batches[number], other)
        if relative(found, sums.total / (sums.weight or 1)) <= training.tolerance:
            return f"{said} It is that with the random numbers of step {other}: the step is not folded into the key."
    return said


def _of_update(path: str, before: np.ndarray, found: np.ndarray, expected: np.ndarray) -> str:
    """How a parameter moved in one step, and how it has to."""
    moved, wanted, extra = found - before, expected - before, found - expected
    if not moved.any():
        return f"{path} does not move."
    if is_same(found, expected):
        return f"{path} is right after the first update that is wrong."
    own = float((extra * before).sum() / max((before * before).sum(), 1e-300))
    if is_same(own * before, extra) and not factor(moved, wanted):
        return f"{path} has {own:+.4g} times itself added, beyond the update of one device."
    return f"its change is {how_it_differs(moved, wanted)}"


def _leaf(tree: Any, path: str) -> np.ndarray:
    return np.asarray(leaf_of(tree, path), np.float64)


def _host(params: Any) -> Any:
    return jax.tree.map(np.asarray, params)
