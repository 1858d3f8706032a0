"""The training loop: steps back to back on the devices, everything else behind them.

The host never waits for the step it has just started. Metrics are read a few steps late, when they are long done, which
also bounds how far the host may run ahead; batches arrive from a background thread, and checkpoints are written by one.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..mesh.errors import UserError
from ..mesh.processes import local_copy
from ..parallel.model import Batch
from ..parallel.precision import FLOAT32
from ..parallel.step.loss_scaling import MOST_IN_A_ROW, is_dynamic
from ..parallel.step.state import StepMetrics, TrainState
from ..parallel.step.train_step import Step
from .ending.exits import DIVERGED

RUN_AHEAD = 2
"""Steps that may be under way or waiting on the devices before the host waits for the oldest."""
READ_TOGETHER = 4
"""Finished steps whose metrics are read at once: the first read after other work costs the host more than the rest."""


class Diverged(RuntimeError):
    """The loss or the norm of the gradients is no longer a finite number.

    Attributes:
        step: the first step that was found so.
        found: what was found, in words.
    """

    exit_code = DIVERGED

    def __init__(self, step: int, found: str, advice: str) -> None:
        super().__init__(f"Step {step}: {found}.{advice}")
        self.step, self.found = step, found


class Progress(NamedTuple):
    """The metrics of one logged step, as numbers on the host.

    Attributes:
        step: optimizer steps done.
        loss: weighted mean of the loss over that step's batch.
        grad_norm: global norm of its gradients before clipping.
        tokens_per_second: weight (tokens, for a language model) per second since the last logged step.
        seconds: seconds per step since the last logged step.
        extra: the model's own metrics of this step, and what was measured in the pause after it (an evaluation).
    """

    step: int
    loss: float
    grad_norm: float
    tokens_per_second: float
    seconds: float
    extra: dict[str, float]


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
    """
    skips = _Skips(max(most_skipped, _most_left_out(step)), on_skip)
    log = _LateLog(start, log_every, on_progress, waited, skips)
    for number, batch in enumerate(batches, start + 1):
        if not may_start(number):
            log.stop()
            _check_finite(number - 1, state)
            on_stop(number - 1, state)
            return state
        state, metrics = step(state, batch)
        log.push(number, metrics)
        if after_step is not None:
            after_step(number, state)
        if pause_at(number):
            log.drain()
            _check_finite(number, state)
            log.pause(number, on_pause(number, state))
            changed = after_pause(number, state)
            state = state if changed is None else changed
            log.go_on()
    log.finish()
    return state


class _LateLog:
    """Reads metrics of steps that are done, checks them, and reports some."""

    def __init__(
        self,
        start: int,
        every: int,
        on_progress: Callable[[Progress], None],
        waited: Callable[[float], None] | None,
        skips: "_Skips",
    ) -> None:
        self._running: deque[tuple[int, StepMetrics]] = deque()
        self._done: list[tuple[int, StepMetrics, float]] = []
        self._first = start + 1
        self._every = every
        self._on_progress = on_progress
        self._waited = waited
        self._skips = skips
        self._reported = start
        self._latest: Progress | None = None
        self._restart_clock(start, time.perf_counter())

    def push(self, number: int, metrics: StepMetrics) -> None:
        """Takes the metrics of a step just started; waits for the oldest where too many are under way."""
        self._running.append((number, metrics))
        if len(self._running) > RUN_AHEAD:
            done = self._wait_for_oldest()
            if done % self._every == 0 or done == self._first or len(self._done) == READ_TOGETHER:
                self._read_done()
                self._report_if_due()

    def pause(self, number: int, measured: dict[str, float]) -> None:
        """Reports the last step, all being done, with what was measured after it; the clock stands still.

        Args:
            number: Of that step. Where its update was left out, what was measured keeps its number, and has the figures
                of the last step that was finite.
            measured: Figures by name; may be empty.
        """
        if measured and self._latest is not None:
            self._latest = self._latest._replace(step=number, extra=self._latest.extra | self._skips.figures)
        self._report(measured)

    def go_on(self) -> None:
        """Lets the clock go on after a pause."""
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Waits for every step and reports the last one only where that is due: a run that goes on has no other log."""
        self.drain()
        self._report_if_due()

    def finish(self) -> None:
        """Waits for every step and reports the last one, if it was not."""
        self.drain()
        self._report({})

    def drain(self) -> None:
        """Waits for every step, and reports those that are due but for the last."""
        while self._running:
            done = self._wait_for_oldest()
            if done % self._every == 0 and self._running:
                self._read_done()
                self._report_if_due()
        self._read_done()

    def _wait_for_oldest(self) -> int:
        number, metrics = self._running.popleft()
        before = time.perf_counter()
        metrics.loss.block_until_ready()
        at = time.perf_counter()
        if self._waited is not None:
            self._waited(at - before)
        self._done.append((number, metrics, at))
        return number

    def _read_done(self) -> None:
        for done in self._done:
            self._read(*done)
        self._done.clear()

    def _read(self, number: int, metrics: StepMetrics, at: float) -> None:
        own = {name: float(np.asarray(local_copy(value))) for name, value in metrics.further.items()}
        loss, grad_norm, weight = (float(np.asarray(local_copy(value))) for value in metrics[:3])  # the cheapest way
        if not self._skips.takes(number, loss, grad_norm):
            self._weight += weight
            elapsed = max(at - self._since, 1e-9)
            speeds = self._weight / elapsed, elapsed / (number - self._counted)
            self._latest = Progress(number, loss, grad_norm, *speeds, own | self._skips.figures)
        if number == self._first:  # it compiles: what follows is timed from its end
            self._restart_clock(number, at)

    def _report_if_due(self) -> None:
        if self._latest is not None and self._latest.step % self._every == 0:
            self._report({})

    def _report(self, extra: dict[str, float]) -> None:
        if self._latest is None or self._latest.step == self._reported:
            return
        progress = self._latest._replace(extra={**self._latest.extra, **extra})
        self._reported = progress.step
        self._restart_clock(progress.step, time.perf_counter())
        self._on_progress(progress)

    def _restart_clock(self, step: int, at: float) -> None:
        """Times and counts what comes after a step, from the time it was done."""
        self._counted, self._since, self._weight = step, at, 0.0


def _most_left_out(step: Any) -> int:
    """Updates in a row that the step itself may leave out, of which one that is wrapped says nothing: 0."""
    return MOST_IN_A_ROW if is_dynamic(getattr(step, "precision", FLOAT32)) else 0


class _Skips:
    """Steps whose loss or norm is not finite: as many in a row as may be, and how many there were."""

    def __init__(self, most: int, on_skip: Callable[[int, str], None]) -> None:
        self._most, self._on_skip = most, on_skip
        self._in_a_row = self._total = 0

    @property
    def figures(self) -> dict[str, float]:
        """How many there were since this start, where there was one."""
        return {"skipped": float(self._total)} if self._total else {}

    def takes(self, number: int, loss: float, grad_norm: float) -> bool:
        """Tells whether a step is one of them.

        Raises:
            Diverged: It is one too many.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        self._total += 1
        found = f"the loss is {loss} and the norm of the gradients {grad_norm}"
        if self._in_a_row > self._most:
            allowed = f" It is number {self._in_a_row} in a row, of at most {self._most}." if self._most else ""
            raise Diverged(
                number,
                found,
                f"{allowed} Lower optimizer.learning_rate, set train.clip_norm, or look at the data of this step. "
                "Checkpoints on disk are from before it.",
            )
        self._on_skip(number, found)
        return True


def _check_finite(number: int, state: TrainState) -> None:
    """The loss of a step is from before its update: the last update shows in the state alone."""
    trees = {"the parameters are": state.params}
    if jax.tree.leaves(state.model_state):
        trees["the model's state is"] = state.model_state
    for name, tree in state.extra._asdict().items() if state.extra else ():
        trees[f"what strategy.data keeps between steps (TrainState.extra.{name}) is"] = tree
    for what, tree in trees.items():
        if not jax.device_get(local_copy(_all_finite(tree))):
            raise Diverged(
                number,
                f"{what} not finite after its update",
                " Lower optimizer.learning_rate. Checkpoints on disk are from before it.",
            )


@jax.jit
def _all_finite(tree: Any) -> jax.Array:
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.array([jnp.isfinite(leaf).all() for leaf in floats]).all()


def evaluate(step: Step, params: Any, batches: Iterable[Batch], model_state: Any = ()) -> float:
    """The weighted mean of the loss over whole batches; the arguments and errors are those of `measure`."""
    return measure(step, params, batches, model_state)["loss"]


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
