"""The training loop: steps run back to back on the devices, and everything else follows behind them.

The host never waits for the step that it has just started. Metrics are read a few steps late, when they are done, which
also limits how far the host can run ahead. A background thread provides batches, and another one writes checkpoints.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..data.batches import eval_batches
from ..data.source import Source
from ..mesh.errors import TryAgain, UserError
from ..mesh.processes import local_copy
from ..parallel.model import Batch
from ..parallel.model.user_errors import user_items
from ..parallel.step.state import TrainState
from ..parallel.step.train_step import Step
from .steps.late_log import RUN_AHEAD, LateLog, Progress, count_rows
from .steps.not_finite import Skips, check_finite, most_left_out


class StepLeftOut(TryAgain):
    """The state has had fewer updates than steps: this process skipped collectives of the others."""


def run_steps(
    step: Step,
    state: TrainState,
    batches: Iterable[Batch],
    *,
    start: int = 0,
    last: int | None = None,
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
        last: The number of the last step, if it is known.
        log_every: Reports each step that is a multiple of this number, each step with a pause, and the last one.
        on_progress: Receives the metrics of a logged step, a few steps after it started.
        pause_at: Returns True if the loop must pause after a step, until the devices are done and the state is finite.
        on_pause: Receives the step and the state, which it must not keep (the next step consumes it). The metrics that
            it returns are reported with the step; its time does not count as training.
        after_pause: Receives the same after that report, so that no checkpoint is on disk before the metrics of its
            step. If it returns a state, training continues with that state.
        may_start: Called before every step; False ends the training, see `stopping.Gate`.
        on_stop: Receives then the last step and the state after it, which is finite: the place to save.
        after_step: Receives every step just started and the state after it, which is still being computed; must neither
            wait nor keep the state.
        waited: Receives the seconds that the host waited for a step.
        most_skipped: The number of consecutive steps with a loss or norm that is not finite, if the optimizer skips
            such updates (`train.not_finite: skip`); their figures are not reported. At least 40 if the step scales its
            loss dynamically.
        on_skip: Receives the number of such a step, and a description.

    Returns:
        The state after the last step.

    Raises:
        Diverged: A loss, a norm or, at a pause, a parameter or `state.extra` is not finite; the message names the step.
            `on_pause` and `after_pause` never see such a state. The numbers of the steps decide when this is raised,
            so every process of a run has started the same steps.
        StepLeftOut: At a logged step or a pause, this process turns out to have skipped a step.
        UserError: The batches end before the last step, and nothing has stopped the training.
    """
    updates = _Updates(start, state)
    log = LateLog(start, log_every, on_progress, waited, Skips(max(most_skipped, most_left_out(step)), on_skip))
    for number, batch in _numbered(batches, start, last):
        if not may_start(number):
            log.stop()
            updates.check(number - 1, state)
            check_finite(number - 1, state)
            on_stop(number - 1, state)
            return state
        state, metrics = step(state, batch)
        if number % log_every == 0:
            updates.note(number, state)
        log.push(number, metrics, count_rows(batch))
        updates.check_noted(number)
        if after_step is not None:
            after_step(number, state)
        if pause_at(number):
            log.drain()
            updates.check(number, state)
            check_finite(number, state)
            log.pause(number, on_pause(number, state))
            changed = after_pause(number, state)
            state = state if changed is None else changed
            log.go_on()
    log.finish()
    return state


def _numbered(batches: Iterable[Batch], start: int, last: int | None) -> Iterator[tuple[int, Batch]]:
    """Yields each batch with the number of its step.

    Raises:
        UserError: They end before the last step.
    """
    number = start
    for batch in user_items("reading the batches", lambda: batches):
        number += 1
        yield number, batch
    if last is not None and number < last:
        raise UserError(
            f"The batches ended after step {number:,} of {last:,}, and neither a callback nor a signal has stopped the "
            "training. Give batches for all steps, or lower train.steps (num_steps in Python)."
        )


class _Updates:
    """Compares the updates of the state with the started steps; involves no other process."""

    def __init__(self, start: int, state: TrainState) -> None:
        """Waits for the devices of the state before the first step.

        Args:
            start: Steps done.
            state: The state after them.
        """
        self._before = self._count(state) - start
        self._noted: deque[tuple[int, jax.Array]] = deque()  # steps, and the updates of the state after each

    def note(self, number: int, state: TrainState) -> None:
        """Keeps the count of a step that has just started; the next step consumes its state."""
        self._noted.append((number, jnp.copy(local_copy(state.step))))

    def check_noted(self, number: int) -> None:
        """Compares the oldest kept count if the devices have reached it, `number` being the latest step."""
        if self._noted and self._noted[0][0] + RUN_AHEAD <= number:
            noted, updates = self._noted.popleft()
            self._compare(noted, int(updates))

    def check(self, number: int, state: TrainState) -> None:
        """Compares the count of a state after a step; waits for its devices."""
        self._noted.clear()
        self._compare(number, self._count(state))

    def _count(self, state: TrainState) -> int:
        return int(np.asarray(local_copy(state.step)))

    def _compare(self, number: int, updates: int) -> None:
        updates -= self._before
        if updates != number:
            raise StepLeftOut(
                f"Step {number}: the state of rank {jax.process_index()} has had {updates} updates. This process has "
                "left out a step and its collectives, so its next collectives met others of the other processes. The "
                "same command continues from the latest checkpoint, which is older."
            )


def evaluate(step: Step, params: Any, batches: Iterable[Batch], model_state: Any = ()) -> float:
    """Returns the weighted mean of the loss over whole batches; see `measure`."""
    return measure(step, params, batches, model_state)["loss"]


def evaluate_sources(
    step: Step,
    params: Any,
    model_state: Any,
    sources: Iterable[Source],
    *,
    global_batch: int,
    follow: Callable[[Iterator[Batch]], Iterator[Batch]] = iter,
    **options: Any,
) -> dict[str, float]:
    """Evaluates every row of some sources: each row counts once, by its weight, for every mesh and batch size.

    Args:
        step: From `build_step`.
        params: The parameters of a state.
        model_state: The state's `model_state`.
        sources: The examples.
        global_batch: Rows of a batch, over all devices.
        follow: Wraps the batches, for a watchdog.
        options: Further arguments of `eval_batches`.

    Raises:
        UserError: There is nothing to evaluate.
        BadDataError: A value is not allowed.
    """

    def batches() -> Generator[Batch, None, None]:
        for source in sources:
            sharding = step.plan.batch_sharding()
            with closing(eval_batches(source, sharding, global_batch=global_batch, **options)) as found:
                yield from found

    with closing(batches()) as found:
        return measure(step, params, follow(found), model_state)


def metric_names(step: Step, batch: Mapping[str, jax.ShapeDtypeStruct]) -> list[str]:
    """Returns the names of the metrics of `measure`, from shapes alone.

    Args:
        step: From `build_step`.
        batch: Global shapes and dtypes of a batch.
    """
    state = step.abstract_state()
    return ["loss", *jax.eval_shape(step.measure, state.params, dict(batch), state.model_state).metrics]


def measure(step: Step, params: Any, batches: Iterable[Batch], model_state: Any = ()) -> dict[str, float]:
    """Returns the weighted means of the loss and of the model's own metrics over whole batches.

    Every mean is exact over the rows with weight, however the batches are padded and the mesh divides them.

    Args:
        step: From `build_step`; its `measure` runs without randomness.
        params: The parameters of a state.
        batches: Global batches of one shape.
        model_state: The state's `model_state`.

    Returns:
        "loss", and every metric by its name.

    Raises:
        UserError: There is nothing to evaluate.
    """
    found: list[dict[str, tuple[Any, Any]]] = []
    for batch in user_items("reading the batches", lambda: batches):
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


def is_due(number: int, every: int, last: int) -> bool:
    """Returns True after every `every` steps (0 = never), and after the last one."""
    return number == last or (every > 0 and number % every == 0)
