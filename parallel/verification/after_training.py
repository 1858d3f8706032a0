"""Checks after training steps that agree: evaluation, saving and restoring, the loss scale, and later tokens.

The check of the loss scale computes in float64, which never overflows. To produce a step that is not finite, one row
therefore gets the weight NaN.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..model import Params
from ..step.loss_scaling import MAX_SCALE, MIN_SCALE, LossScale
from ..step.state import TrainState
from .case import Case
from .causality import WEIGHTS, Future, look_ahead, reweighted
from .diagnosis import explain_sums
from .differences import relative
from .reference import Reference, Sums, on_host, pairs
from .result import SEES_AHEAD, Difference, Measured, Verification
from .round_trip import RoundTrip, SaveAndRestore, differing_arrays, round_trip

MAX_LINES = 3
OTHER_METRIC = "The sum of the losses and the weight are correct; those of this metric are not."


class Averages(NamedTuple):
    """Averages of the parameters that an optimizer keeps, and evaluations read.

    Attributes:
        of_state: A state on the mesh -> parameters on the mesh, as evaluations read them.
        of_optimizer: (parameters, the optimizer's state), on the host, blocks in the model's order -> the same.
    """

    of_state: Callable[[TrainState], Any]
    of_optimizer: Callable[[Any, Any], Any]


def check_after_steps(
    measured: Verification,
    case: Case,
    state: TrainState,
    reference: Reference,
    save_and_restore: SaveAndRestore | None,
    averages: Averages | None,
) -> Verification:
    """Adds the checks after training to a verification, with the first difference that they find.

    Args:
        measured: The verification of the steps, without differences.
        case: The training.
        state: The state after all steps; it is consumed.
        reference: The training on one device.
        save_and_restore: Writes a state to files and reads it; by default, the state stays in memory.
        averages: The averages that the optimizer keeps, if any.
    """
    errors, found = {}, []
    params = jax.device_get(case.in_model_order(state.params))
    evaluated = {"evaluation": (params, state.params, case.tolerance)}
    if averages:
        mean = jax.device_get(averages.of_optimizer(reference.params, reference.opt_state))
        evaluated["evaluation of the averages"] = (mean, averages.of_state(state), case.params_tolerance)
    for what, (host, on_mesh, tolerance) in evaluated.items():
        if sums := _evaluate(case, state, host, on_mesh):
            errors[what] = error = _largest_error(*sums, tolerance)
            if error.differs:
                hint = case.contract.text or explain_sums(*sums, case.tolerance) or OTHER_METRIC
                found.append(Difference(what=what, where=error.where, relative=error.relative, hint=hint))
    loss_scale = check_loss_scale(case, state)
    if loss_scale:
        found.append(Difference(what="loss scale", where="", relative=1.0, hint=loss_scale))
    future = _look_ahead(case, params)
    if future.positions:
        position, change = future.seen or (None, 0.0)
        where = "" if position is None else f"after position {position}"
        errors["loss with other later tokens"] = Measured(change, case.tolerance, where)
    trip = round_trip(case.step, state, case.batches[0], save_and_restore)
    errors["a step after restoring"] = Measured(trip.next_step_rel, case.params_tolerance)
    found += [*_checkpoint_differences(trip, case.params_tolerance), *_leaks(future)]
    return replace(
        measured,
        errors={**measured.errors, **errors},
        loss_scale=loss_scale,
        future=future,
        round_trip=trip,
        first_difference=next(iter(found), None),
    )


def _evaluate(case: Case, state: TrainState, host: Params, on_mesh: Params) -> tuple[Sums, Sums] | None:
    """Evaluates a batch with weight zero for its last row, as in padding.

    Args:
        case: The training.
        state: The state after all steps.
        host: The parameters for one device, in the model's order.
        on_mesh: The parameters on the mesh.

    Returns:
        The sums on the mesh and those of one device; None if one device cannot evaluate the model.
    """
    batch = case.batches[-1]
    if WEIGHTS in batch and len(batch[WEIGHTS]) > 1:
        batch = reweighted(batch, -1, 0)
    try:
        expected = case.one_device.measure(host, batch, jax.device_get(state.model_state))
    except Exception:  # whatever the model raises without a key
        return None
    total, weight = case.step.evaluate(on_mesh, dict(batch), state.model_state)
    metrics = case.step.measure(on_mesh, dict(batch), state.model_state).metrics
    return Sums(float(total), float(weight), None, on_host(dict(pairs(metrics)))), expected


def _largest_error(found: Sums, expected: Sums, tolerance: float) -> Measured:
    """Compares the sums of an evaluation; those of a metric only if loss and weight agree."""
    error = max(map(relative, found[:2], expected[:2]))
    metrics = [(max(map(relative, found.metrics[name], sums)), name) for name, sums in expected.metrics.items()]
    of_metric, name = max(metrics, default=(0.0, ""))
    if error <= tolerance < of_metric:
        return Measured(of_metric, tolerance, f"metric {name!r}")
    return Measured(error, tolerance)


def check_loss_scale(case: Case, state: TrainState) -> str | None:
    """Takes a step that is not finite, and one after which the scale must double.

    Args:
        case: The training.
        state: The state after all steps; it is not consumed.

    Returns:
        The first deviation from the documented behavior, "" if there is none; None without a dynamic scale, or if no
        weight makes the gradients of one device invalid.
    """
    scale, batch = state.loss_scale, case.batches[0]
    if not isinstance(scale, LossScale) or not np.issubdtype(np.asarray(batch.get(WEIGHTS, 0)).dtype, np.floating):
        return None
    invalid = reweighted(batch, 0, np.nan)
    params, model_state = jax.device_get((case.in_model_order(state.params), state.model_state))
    gradients = jax.tree.leaves(case.one_device.sums(params, invalid, int(state.step), model_state).gradients)
    if all(np.isfinite(leaf).all() for leaf in gradients):
        return None
    before = float(scale.scale)
    after, _ = case.step(jax.tree.map(jnp.copy, state), invalid)
    new, old = (each._replace(step=(), loss_scale=()) for each in (after, state))
    if changed := list(differing_arrays(new, old, "after it")):
        return f"A step whose gradients are not finite changes {len(changed)} arrays: {changed[0]}."
    if problem := _scale_problem(after.loss_scale, max(before / 2, MIN_SCALE), "whose gradients are not finite"):
        return problem
    interval = case.step.precision.loss_scale_interval
    grown = state._replace(loss_scale=scale._replace(good_steps=jnp.full_like(scale.good_steps, interval - 1)))
    after, _ = case.step(jax.tree.map(jnp.copy, grown), dict(batch))
    return _scale_problem(
        after.loss_scale, min(before * 2, MAX_SCALE), f"that is number {interval} in a row to be finite"
    )


def _scale_problem(found: LossScale, scale: float, which: str) -> str:
    """Describes an unexpected scale, or a count of finite steps that was not reset; "" if there is neither."""
    if (float(found.scale), int(found.good_steps)) == (scale, 0):
        return ""
    return (
        f"After a step {which}, the loss scale is {float(found.scale):g} and {int(found.good_steps)} steps count as "
        f"finite; expected {scale:g} and 0."
    )


def _look_ahead(case: Case, params: Params) -> Future:
    """Changes later tokens on one device, if it can evaluate the model."""
    try:
        return look_ahead(lambda batch: case.one_device.measure(params, batch).total, case.batches[0], case.tolerance)
    except Exception as error:
        return Future(untried=f"one device cannot evaluate the model: {type(error).__name__}")


def _checkpoint_differences(trip: RoundTrip, tolerance: float) -> Iterator[Difference]:
    """Yields the difference that saving and restoring makes."""
    if lines := trip.differing:
        more = f"; and {len(lines) - MAX_LINES} more." if len(lines) > MAX_LINES else "."
        hint = "; ".join(lines[:MAX_LINES]) + more
        yield Difference(what="checkpoint", where=lines[0].split(",")[0], relative=float(len(lines)), hint=hint)
    elif trip.next_step_rel > tolerance:
        hint = "Every array was restored exactly, but one more step from the restored state gives another result."
        yield Difference(what="checkpoint", where="", relative=trip.next_step_rel, hint=hint)


def _leaks(future: Future) -> Iterator[Difference]:
    """Yields the difference that later tokens make."""
    if future.seen:
        position, change = future.seen
        hint = (
            f"On one device, other tokens after position {position} change the losses up to position {position}, by "
            f"{change:.1e}: the model sees later tokens, including those that it predicts. Operations that mix "
            "positions (attention, convolutions, norms, means) must read only earlier ones."
        )
        yield Difference(what=SEES_AHEAD, where="", relative=change, hint=hint)
