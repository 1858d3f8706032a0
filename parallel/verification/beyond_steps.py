"""Beyond training steps that are right: evaluation, a state that is saved and restored, tokens that lie ahead."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from ..step.state import TrainState
from ..step.train_step import Step
from . import diagnosis
from .causality import Future, look_ahead
from .differences import relative
from .loss_scale_check import check_loss_scale
from .reference import HostBatch, OneDevice, Reference
from .result import SEES_AHEAD, Difference, Verification
from .round_trip import RoundTrip, SaveAndRestore, round_trip
from .row_counts import WEIGHTS, Case
from .sums import on_host, pairs
from .update_cause import Training

MOST_LINES = 3


class Evaluation(NamedTuple):
    """An evaluation of one batch; sums are (loss, weight).

    Attributes:
        found: the strategy's sums.
        reference: those of one device.
        params: of both, as they are stored, on the host.
        batch: the batch.
        metrics: the error of each of the model's metrics, the worse of its two sums.
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
        of_state: a state on the mesh -> parameters on the mesh, as evaluations read them.
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
    """Adds to a verification of training steps what lies beyond them, and the first difference there.

    Args:
        measured: The verification, of which nothing differs.
        training: The steps, and the one device.
        state: The state after them; it is consumed.
        reference: The same training on one device.
        save_and_restore: Writes a state to files and reads it; None passes it on in memory.
        case: What a cause is looked for with; made when it is needed.
        averages: Those that the optimizer keeps, if any.
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
    future = _future(one_device, params, batches[0], measured.tolerance)
    bound = measured.params_tolerance
    options: Any = {"save_and_restore": save_and_restore, "tolerance": bound}
    trip = round_trip(step, state, batches[0], reference, one_device, **options)
    found = (
        *_of_evaluation(evaluation, measured.tolerance, case),
        *_of_averages(of_averages, bound),
        *_of_loss_scale(loss_scale),
        *_of_checkpoint(trip, bound),
        *_of_future(future),
    )
    return replace(
        measured,
        evaluation_rel=evaluation.relative if evaluation else None,
        averages_rel=of_averages.relative if of_averages else None,
        loss_scale=loss_scale,
        future=future,
        round_trip=trip,
        first_difference=next(iter(found), None),
    )


def _of_evaluation(evaluation: Evaluation | None, bound: float, case: Callable[[], Case]) -> Iterator[Difference]:
    if evaluation is None or evaluation.relative <= bound:
        return
    where = max(evaluation.metrics, key=lambda name: evaluation.metrics[name], default="")
    if evaluation.of_sums > bound:
        hint = diagnosis.of_evaluation(case(), *evaluation[:4])
        yield Difference(what="evaluation", where="", relative=evaluation.of_sums, hint=hint)
    else:
        hint = "The sums of the losses and the weights are right; those of this metric are not."
        yield Difference(what="evaluation", where=f"metric {where!r}", relative=evaluation.relative, hint=hint)


def _of_averages(evaluation: Evaluation | None, bound: float) -> Iterator[Difference]:
    if evaluation and evaluation.relative > bound:
        (found, _), (expected, _) = evaluation.found, evaluation.reference
        hint = (
            f"With the averages of the parameters, the sum of the losses is {found:.10g}, and {expected:.10g} on one "
            "device. The optimizer's state, the averages among it, is right, and so is an evaluation of the parameters."
        )
        yield Difference(what="evaluation of the averages", where="", relative=evaluation.relative, hint=hint)


def _of_loss_scale(problem: str | None) -> Iterator[Difference]:
    if problem:
        yield Difference(what="loss scale", where="", relative=1.0, hint=problem)


def _of_future(future: Future) -> Iterator[Difference]:
    if future.seen:
        position, change = future.seen
        hint = (
            f"On one device, other tokens after position {position} change the losses up to position {position}, by "
            f"{change:.1e}: the model sees later tokens, among them those that it predicts. Whatever mixes positions "
            "(attention, convolutions, norms, means) has to look at earlier ones alone."
        )
        yield Difference(what=SEES_AHEAD, where="", relative=change, hint=hint)


def _of_checkpoint(trip: RoundTrip, bound: float) -> Iterator[Difference]:
    worst = trip.params[0]
    if worst.relative > bound:
        hint = (
            "The strategy's own parameters are right, what is saved is not: it has to be in the model's order, "
            "block n of each array in row n of dim 0."
        )
        yield Difference(what="checkpoint", where=worst.path, relative=worst.relative, hint=hint)
    elif trip.differing:
        more = len(trip.differing) - MOST_LINES
        hint = "; ".join(trip.differing[:MOST_LINES]) + (f"; and {more} more." if more > 0 else ".")
        path = trip.differing[0].split(",")[0]
        yield Difference(what="checkpoint", where=path, relative=float(len(trip.differing)), hint=hint)
    elif trip.next_step > bound:
        hint = "Every array came back as it was, but one more step from them is another one."
        yield Difference(what="checkpoint", where="", relative=trip.next_step, hint=hint)


def _evaluation(
    step: Step, state: TrainState, host: Any, params: Any, one_device: OneDevice, batch: HostBatch
) -> Evaluation | None:
    """The sums over a batch whose last row weighs nothing, as padding does; None if one device cannot evaluate.

    Args:
        step: The step.
        state: Its state.
        host: The parameters for one device, as they are stored.
        params: The same on the mesh.
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


def _future(one_device: OneDevice, params: Any, batch: HostBatch, tolerance: float) -> Future:
    """Whether the model sees later tokens, as it is evaluated."""

    def loss(batch: HostBatch) -> float:
        return one_device.evaluate(params, batch)[0]

    try:
        return look_ahead(loss, batch, tolerance)
    except Exception as error:
        return Future(untried=f"one device cannot evaluate the model: {type(error).__name__}")
