"""The training loop: steps back to back on the devices, everything else behind them.

The host never waits for the step it has just started. Metrics are read a few steps late, when they are long done, which
also bounds how far the host may run ahead; batches arrive from a background thread, and checkpoints are written by one.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from ..mesh.errors import UserError
from ..mesh.processes import local_copy
from ..parallel.model import Batch
from ..parallel.step.state import TrainState
from ..parallel.step.train_step import Step
from .ending.exits import TRY_AGAIN
from .steps.late_log import RUN_AHEAD, LateLog, Progress
from .steps.not_finite import Skips, check_finite, most_left_out


class StepLeftOut(RuntimeError):
    """The state has had fewer updates than there were steps: this process has left out collectives of the others."""

    exit_code = TRY_AGAIN


def run_steps(
    step: Step,
    state: TrainState,
    batches: Iterable[Batch],
    *,
    start: int = 0,
    log_every: int = 10,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    pause_at: Callable[[int], bool] = lambda number: False,
    on_pause: Callable[[int, TrainState], dict[str, float]] = lambda number, state: {},
    after_pause: Callable[[int, TrainState], TrainState | None] = lambda number, state: None,
    may_start: Callable[[int], bool] = lambda number: True,
    on_stop: Callable[[int, TrainState], None] = lambda number, state: None,
    after_step: Callable[[int, TrainState], None] | None = None,
    waited: Callable[[float], None] | None = None,
    most_skipped: int = 0,
    on_skip: Callable[[int, str], None] = lambda number, found: None,
) -> TrainState:
    """Trains on every batch given.

    Args:
        step: From `build_step`.
        state: The state before the first batch; it is consumed.
        batches: Global batches, in order.
        start: Steps done before the first batch.
        log_every: Report each step whose number is a multiple of this, each step paused at, and the last one.
        on_progress: Called with the metrics of a logged step, a few steps after it was started.
        pause_at: After which steps to wait until the devices are done and found finite, for `on_pause`.
        on_pause: Called with the number of the step and the state, which it must not keep (the next step consumes it).
            What it returns is reported with the step; its time does not count as training.
        after_pause: Called with the same, after that report: the place to save, so that no checkpoint is ever on disk
            before the metrics of its step. A state that it returns is the one to go on with.
        may_start: Asked before every step; the first that may not start ends the training, see `stopping.Gate`.
        on_stop: Called then with the number of the last step and the state after it, found finite: the place to save.
        after_step: Called with the number of every step just started and the state after it, which is still being
            computed: it must wait for nothing, and not keep the state. None calls nothing.
        waited: Called with the seconds that the host has waited for a step. None calls nothing.
        most_skipped: Steps in a row whose loss or norm may be not finite, where the optimizer leaves such updates out
            (`train.not_finite: skip`); their figures are not reported. At least 40 where the step scales its loss
            dynamically.
        on_skip: Called with the number of such a step, and what was found.

    Returns:
        The state after the last step.

    Raises:
        Diverged: A loss, a norm or, at a pause, a parameter or what strategies keep in `state.extra` is not finite; the
            message names the step. `on_pause` and `after_pause` never see such a state. When it is raised follows from
            the numbers of the steps alone, so every process of a run has started the same steps by then.
        StepLeftOut: At a pause, this process is found to have left out a step.
    """
    begun = _updates(state) - start
    skips = Skips(max(most_skipped, most_left_out(step)), on_skip)
    log = LateLog(start, log_every, on_progress, waited, skips)
    for number, batch in enumerate(batches, start + 1):
        if not may_start(number):
            log.stop()
            _check_updates(number - 1, _updates(state) - begun)
            check_finite(number - 1, state)
            on_stop(number - 1, state)
            return state
        state, metrics = step(state, batch)
        log.push(number, metrics)
        if after_step is not None:
            after_step(number, state)
        if pause_at(number):
            log.drain()
            _check_updates(number, _updates(state) - begun)
            check_finite(number, state)
            log.pause(number, on_pause(number, state))
            changed = after_pause(number, state)
            state = state if changed is None else changed
            log.go_on()
    log.finish()
    return state


def _updates(state: TrainState) -> int:
    """The number of updates that a state has had; waits for its devices."""
    return int(np.asarray(local_copy(state.step)))


def _check_updates(number: int, updates: int) -> None:
    """Compares the updates that the state has had with the steps that were started; involves no other process."""
    if updates != number:
        raise StepLeftOut(
            f"Step {number}: the state of rank {jax.process_index()} has had {updates} updates. This process has left "
            "out a step and its collectives, so that its next ones met other ones of the others. The same command goes "
            "on from the newest checkpoint, which is from before that."
        )


def evaluate(step: Step, params: Any, batches: Iterable[Batch], model_state: Any = ()) -> float:
    """The weighted mean of the loss over whole batches; the arguments and errors are those of `measure`."""
    return measure(step, params, batches, model_state)["loss"]


def metric_names(step: Step, batch: Mapping[str, jax.ShapeDtypeStruct]) -> list[str]:
    """Returns the names of the metrics of `measure`, from shapes alone.

    Args:
        step: From `build_step`.
        batch: Global shapes and dtypes of a batch.
    """
    state = step.abstract_state()
    return ["loss", *jax.eval_shape(step.measure, state.params, dict(batch), state.model_state).metrics]


def measure(step: Step, params: Any, batches: Iterable[Batch], model_state: Any = ()) -> dict[str, float]:
    """The weighted means of the loss and of the model's own metrics over whole batches.

    Every mean is exact over the rows that have weight, however batches are padded and the mesh divides them.

    Args:
        step: From `build_step`; its `measure` runs without randomness.
        params: The parameters of a state.
        batches: Global batches of one shape.
        model_state: The state's `model_state`.

    Returns:
        "loss", and every metric by its name.

    Raises:
        UserError: There was nothing to evaluate.
    """
    found: list[dict[str, tuple[Any, Any]]] = []
    for batch in batches:
        sums = step.measure(params, batch, model_state)
        found.append({"loss": (sums.total, sums.weight), **sums.metrics})
        if len(found) > RUN_AHEAD:
            found[-1 - RUN_AHEAD]["loss"][0].block_until_ready()
    pairs = [jax.device_get(jax.tree.map(local_copy, each)) for each in found]
    names = list(pairs[0]) if pairs else []
    totals = {name: np.asarray([each[name] for each in pairs], np.float64).sum(axis=0) for name in names}
    if not pairs or totals["loss"][1] == 0:
        raise UserError("There is nothing to evaluate: every row has weight zero. Raise data.eval_fraction.")
    return {name: float(total / (weight or 1)) for name, (total, weight) in totals.items()}
