"""Checks after training steps that agree: evaluation, saving and restoring, the loss scale, and later tokens.

Both sides of the loss scale check compute in float64, which never overflows. So one row gets the weight NaN to produce
a step that is not finite.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...layouts.paths import leaves_with_paths
from ..step.loss_scaling import MAX_SCALE, MIN_SCALE, LossScale
from ..step.state import TrainState
from ..step.train_step import Step
from . import diagnosis
from .causality import Future, look_ahead
from .diagnosis import Training
from .differences import numbers, relative
from .reference import HostBatch, OneDevice, Reference
from .result import SEES_AHEAD, Difference, Verification
from .round_trip import RoundTrip, SaveAndRestore, round_trip
from .row_counts import WEIGHTS, Case
from .sums import on_host, pairs

MAX_LINES = 3


def check_loss_scale(step: Step, state: TrainState, batch: HostBatch, one_device: OneDevice) -> str | None:
    """Takes a step that is not finite, and one after which the scale must double.

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
    after, _ = step(jax.tree.map(jnp.copy, state), dict(invalid))
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
    if problem := _unlike(after.loss_scale, max(before / 2, MIN_SCALE), 0, "whose gradients are not finite"):
        return problem
    interval = step.precision.loss_scale_interval
    grown = state._replace(loss_scale=scale._replace(good_steps=jnp.full_like(scale.good_steps, interval - 1)))
    after, _ = step(jax.tree.map(jnp.copy, grown), dict(batch))
    return _unlike(after.loss_scale, min(before * 2, MAX_SCALE), 0, f"that is number {interval} in a row to be finite")


def _unlike(found: LossScale, scale: float, good_steps: int, which: str) -> str:
    """The text for a scale that is not as expected; "" if it is."""
    if (float(found.scale), int(found.good_steps)) == (scale, good_steps):
        return ""
    return (
        f"After a step {which}, the loss scale is {float(found.scale):g} and {int(found.good_steps)} steps count as "
        f"finite; expected {scale:g} and {good_steps}."
    )


class Evaluation(NamedTuple):
    """An evaluation of one batch; sums are (loss, weight).

    Attributes:
        found: The strategy's sums.
        reference: The sums of one device.
        params: The parameters of both in the stored order, on the host.
        batch: The batch.
        metrics: The error of each of the model's metrics, the worse of its two sums.
    """

    found: tuple[float, float]
    reference: tuple[float, float]
    params: Any
    batch: HostBatch
    metrics: Mapping[str, float] = {}

    @property
    def of_sums(self) -> float:
        """The error of the worse of the two sums."""
        return max(map(relative, self.found, self.reference))

    @property
    def relative(self) -> float:
        """The largest error, metrics included."""
        return max((self.of_sums, *self.metrics.values()))


class Averages(NamedTuple):
    """Averages of the parameters that an optimizer keeps, and evaluations read.

    Attributes:
        of_state: A state on the mesh -> parameters on the mesh, as evaluations read them.
        of_optimizer: (parameters, the optimizer's state), on the host, blocks in the model's order -> the same.
    """

    of_state: Callable[[TrainState], Any]
    of_optimizer: Callable[[Any, Any], Any]


def beyond_steps(
    measured: Verification,
    training: Training,
    state: TrainState,
    reference: Reference,
    save_and_restore: SaveAndRestore | None,
    case: Callable[[], Case],
    averages: Averages | None = None,
) -> Verification:
    """Adds the checks after training to a verification, with the first difference that they find.

    Args:
        measured: The verification of the steps, without differences.
        training: The steps, and the one device.
        state: The state after them; it is consumed.
        reference: The training on one device.
        save_and_restore: Writes a state to files and reads it; by default, the state stays in memory.
        case: Creates the data for finding a cause.
        averages: The averages that the optimizer keeps, if any.
    """
    step, one_device, batches = training.step, training.one_device, training.batches
    params = jax.tree.map(np.asarray, state.params)
    evaluation = _evaluation(step, state, params, state.params, one_device, batches[-1])
    of_averages = None
    if averages and evaluation:
        mean = averages.of_optimizer(one_device.to_model(reference.params), reference.opt_state)
        mean, means = one_device.to_stored(mean), averages.of_state(state)
        of_averages = _evaluation(step, state, mean, means, one_device, batches[-1])
    loss_scale = check_loss_scale(step, state, batches[0], one_device)
    try:
        future = look_ahead(lambda batch: one_device.measure(params, batch).total, batches[0], measured.tolerance)
    except Exception as error:
        future = Future(untried=f"one device cannot evaluate the model: {type(error).__name__}")
    bound = measured.params_tolerance
    trip = round_trip(step, state, batches[0], reference, one_device, save_and_restore, bound)
    found = _differences(evaluation, of_averages, loss_scale, trip, future, case, measured.tolerance, bound)
    return replace(
        measured,
        evaluation_rel=evaluation.relative if evaluation else None,
        averages_rel=of_averages.relative if of_averages else None,
        loss_scale=loss_scale,
        future=future,
        round_trip=trip,
        first_difference=next(found, None),
    )


def _differences(
    evaluation: Evaluation | None,
    of_averages: Evaluation | None,
    loss_scale: str | None,
    trip: RoundTrip,
    future: Future,
    case: Callable[[], Case],
    tolerance: float,
    params_tolerance: float,
) -> Iterator[Difference]:
    """Yields the differences that the checks after training find."""
    if evaluation and evaluation.of_sums > tolerance:
        hint = diagnosis.explain_evaluation(case(), *evaluation[:4])
        yield Difference(what="evaluation", where="", relative=evaluation.of_sums, hint=hint)
    elif evaluation and evaluation.relative > tolerance:
        hint = "The sums of the losses and the weights are right; those of this metric are not."
        where = f"metric {max(evaluation.metrics, key=lambda name: evaluation.metrics[name])!r}"
        yield Difference(what="evaluation", where=where, relative=evaluation.relative, hint=hint)
    if of_averages and of_averages.relative > params_tolerance:
        hint = (
            f"With the averages of the parameters, the sum of the losses is {of_averages.found[0]:.10g}, and "
            f"{of_averages.reference[0]:.10g} on one device. The optimizer's state, the averages among it, is right, "
            "and so is an evaluation of the parameters."
        )
        yield Difference(what="evaluation of the averages", where="", relative=of_averages.relative, hint=hint)
    if loss_scale:
        yield Difference(what="loss scale", where="", relative=1.0, hint=loss_scale)
    worst, lines = trip.params[0], trip.differing
    if worst.relative > params_tolerance:
        hint = (
            "The strategy's own parameters are right, what is saved is not: it has to be in the model's order, "
            "block n of each array in row n of dim 0."
        )
        yield Difference(what="checkpoint", where=worst.path, relative=worst.relative, hint=hint)
    elif lines:
        more = f"; and {len(lines) - MAX_LINES} more." if len(lines) > MAX_LINES else "."
        hint = "; ".join(lines[:MAX_LINES]) + more
        yield Difference(what="checkpoint", where=lines[0].split(",")[0], relative=float(len(lines)), hint=hint)
    elif trip.next_step > params_tolerance:
        hint = "Every array came back as it was, but one more step from them is another one."
        yield Difference(what="checkpoint", where="", relative=trip.next_step, hint=hint)
    if future.seen:
        position, change = future.seen
        hint = (
            f"On one device, other tokens after position {position} change the losses up to position {position}, by "
            f"{change:.1e}: the model sees later tokens, among them those that it predicts. Whatever mixes positions "
            "(attention, convolutions, norms, means) must read earlier ones alone."
        )
        yield Difference(what=SEES_AHEAD, where="", relative=change, hint=hint)


def _evaluation(
    step: Step, state: TrainState, host: Any, params: Any, one_device: OneDevice, batch: HostBatch
) -> Evaluation | None:
    """Evaluates a batch with weight zero for its last row, as in padding; None if one device cannot evaluate.

    Args:
        step: The step.
        state: Its state.
        host: The parameters for one device, in the stored order.
        params: The parameters on the mesh.
        one_device: The one device.
        batch: A global batch.
    """
    if WEIGHTS in batch and len(batch[WEIGHTS]) > 1:
        batch = {**batch, WEIGHTS: np.concatenate([batch[WEIGHTS][:-1], np.zeros_like(batch[WEIGHTS][-1:])])}
    try:
        expected = one_device.measure(host, batch, jax.tree.map(np.asarray, state.model_state))
    except Exception:  # whatever the model raises without a key
        return None
    total, weight = step.evaluate(params, dict(batch), state.model_state)
    found = on_host(dict(pairs(step.measure(params, dict(batch), state.model_state).metrics)))
    metrics = {name: max(map(relative, found[name], sums)) for name, sums in expected.metrics.items()}
    return Evaluation((float(total), float(weight)), (expected.total, expected.weight), host, batch, metrics)
