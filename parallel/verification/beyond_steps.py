"""Beyond training steps that are right: evaluation, a state that is saved and restored, tokens that lie ahead."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from ..step.state import TrainState
from ..step.train_step import Step
from . import diagnosis
from .causality import Future, look_ahead
from .differences import relative
from .reference import HostBatch, OneDevice, Reference
from .result import SEES_AHEAD, Difference, Verification
from .round_trip import RoundTrip, SaveAndRestore, round_trip
from .row_counts import WEIGHTS, Case
from .update_cause import Training

MOST_LINES = 3


class Evaluation(NamedTuple):
    """An evaluation of one batch; sums are (loss, weight).

    Attributes:
        found: the strategy's sums.
        reference: those of one device.
        params: of both, as they are stored, on the host.
        batch: the batch.
    """

    found: tuple[float, float]
    reference: tuple[float, float]
    params: Any
    batch: HostBatch

    @property
    def relative(self) -> float:
        """The error of the worse of the two."""
        return max(map(relative, self.found, self.reference))


def beyond_steps(
    measured: Verification,
    training: Training,
    state: TrainState,
    reference: Reference,
    save_and_restore: SaveAndRestore | None,
    case: Callable[[], Case],
) -> Verification:
    """Adds to a verification of training steps what lies beyond them, and the first difference there.

    Args:
        measured: The verification, of which nothing differs.
        training: The steps, and the one device.
        state: The state after them; it is consumed.
        reference: The same training on one device.
        save_and_restore: Writes a state to files and reads it; None passes it on in memory.
        case: What a cause is looked for with; made when it is needed.
    """
    step, one_device, batches = training.step, training.one_device, training.batches
    params = jax.tree.map(np.asarray, state.params)
    evaluation = _evaluation(step, state, params, one_device, batches[-1])
    future = _future(one_device, params, batches[0], measured.tolerance)
    bound = measured.params_tolerance
    options: Any = {"save_and_restore": save_and_restore, "tolerance": bound}
    trip = round_trip(step, state, batches[0], reference, one_device, **options)
    found = (
        *_of_evaluation(evaluation, measured.tolerance, case),
        *_of_checkpoint(trip, bound),
        *_of_future(future),
    )
    return replace(
        measured,
        evaluation_rel=evaluation.relative if evaluation else None,
        future=future,
        round_trip=trip,
        first_difference=next(iter(found), None),
    )


def _of_evaluation(evaluation: Evaluation | None, bound: float, case: Callable[[], Case]) -> Iterator[Difference]:
    if evaluation and evaluation.relative > bound:
        hint = diagnosis.of_evaluation(case(), *evaluation)
        yield Difference(what="evaluation", where="", relative=evaluation.relative, hint=hint)


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


def _evaluation(step: Step, state: TrainState, host: Any, one_device: OneDevice, batch: HostBatch) -> Evaluation | None:
    """The sums over a batch whose last row weighs nothing, as padding does; None where one device has none."""
    if WEIGHTS in batch and len(batch[WEIGHTS]) > 1:
        batch = {**batch, WEIGHTS: np.concatenate([batch[WEIGHTS][:-1], np.zeros_like(batch[WEIGHTS][-1:])])}
    try:
        expected = one_device.evaluate(host, batch, jax.tree.map(np.asarray, state.model_state))
    except Exception:  # whatever the model raises without a key
        return None
    total, weight = step.evaluate(state.params, dict(batch), state.model_state)
    return Evaluation((float(total), float(weight)), expected, host, batch)


def _future(one_device: OneDevice, params: Any, batch: HostBatch, tolerance: float) -> Future:
    """Whether the model sees later tokens, as it is evaluated."""

    def loss(batch: HostBatch) -> float:
        return one_device.evaluate(params, batch)[0]

    try:
        return look_ahead(loss, batch, tolerance)
    except Exception as error:
        return Future(untried=f"one device cannot evaluate the model: {type(error).__name__}")
