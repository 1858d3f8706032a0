"""Reads the metrics of steps a few steps late, so that the host never waits for a step that has just started."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...mesh.processes import local_copy
from ...parallel.step.state import StepMetrics
from .not_finite import Skips

RUN_AHEAD = 2
"""Steps that may run or wait on the devices before the host waits for the oldest."""
READ_TOGETHER = 4
"""Finished steps with metrics that are read together: the first read after other work is the most expensive."""


class Progress(NamedTuple):
    """The metrics of one logged step, as numbers on the host.

    Attributes:
        step: The completed optimizer steps.
        loss: The weighted mean of the loss over the batch of that step.
        grad_norm: The global norm of its gradients before clipping.
        weight_per_second: The weight (for a language model, its tokens) per second since the last logged step.
        rows_per_second: The rows per second since then; None if not each row has one weight, but each of its tokens.
        seconds: The seconds per step since the last logged step.
        extra: The model's own metrics of this step, and those of an evaluation after it.
    """

    step: int
    loss: float
    grad_norm: float
    weight_per_second: float
    rows_per_second: float | None
    seconds: float
    extra: dict[str, float]

    def record(self) -> dict[str, float]:
        """Returns the figures by the names that they have in metrics.jsonl."""
        figures = {"step": self.step, "loss": self.loss, "grad_norm": self.grad_norm}
        figures["tokens_per_second"] = self.weight_per_second
        if self.rows_per_second is not None:
            figures["rows_per_second"] = self.rows_per_second
        figures["seconds"] = self.seconds
        return {**figures, **self.extra}


class _Logged(NamedTuple):
    """A step that was started.

    Attributes:
        number: The number of the step.
        metrics: Its metrics, which are still being computed.
        rows: The rows of its batch; None if their weights are not those of rows.
    """

    number: int
    metrics: StepMetrics
    rows: int | None


def count_rows(batch: Mapping[str, Any]) -> int | None:
    """Returns the rows of a global batch; None if its weights are not those of rows, but of the tokens of each."""
    shape = np.shape(batch.get("weights", 0.0))
    return shape[0] if len(shape) == 1 else None


@dataclass(eq=False)
class LateLog:
    """Reads metrics of completed steps, checks them, and reports some.

    Attributes:
        start: The completed steps.
        every: The number of steps between reports.
        on_progress: Called with the metrics of a reported step.
        waited: Called with the seconds that the host has waited for a step, if not None.
        skips: Counts steps that are not finite, which are not reported.
    """

    start: int
    every: int
    on_progress: Callable[[Progress], None]
    waited: Callable[[float], None] | None
    skips: Skips

    def __post_init__(self) -> None:
        """Starts the clock."""
        self._running: deque[_Logged] = deque()
        self._done: list[tuple[_Logged, float]] = []
        self._first = self.start + 1
        self._reported = self.start
        self._latest: Progress | None = None
        self._restart_clock(self.start, time.perf_counter())

    def push(self, number: int, metrics: StepMetrics, rows: int | None = None) -> None:
        """Adds the metrics of a step that has just started; waits for the oldest step if too many are running.

        Args:
            number: The number of the step.
            metrics: Its metrics.
            rows: The rows of its batch, see `count_rows`.
        """
        self._running.append(_Logged(number, metrics, rows))
        if len(self._running) > RUN_AHEAD:
            done = self._wait_for_oldest()
            if done % self.every == 0 or done == self._first or len(self._done) == READ_TOGETHER:
                self._read_done()
                self._report_if_due()

    def pause(self, number: int, measured: dict[str, float]) -> None:
        """Reports the last completed step with the metrics of an evaluation, and stops the clock.

        Args:
            number: The step. If its update was skipped, the report has its number and the loss of the last finite step.
            measured: Metrics by name; may be empty.
        """
        if measured and self._latest is not None:
            self._latest = self._latest._replace(step=number, extra=self._latest.extra | self.skips.figures)
        self._report(measured)

    def go_on(self) -> None:
        """Restarts the clock after a pause."""
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Waits for every step and reports the last one only if it is due, as in a run without interruption."""
        self.drain()
        self._report_if_due()

    def finish(self) -> None:
        """Waits for every step and reports the last one unless it was reported."""
        self.drain()
        self._report({})

    def drain(self) -> None:
        """Waits for every step, and reports those that are due except the last."""
        while self._running:
            done = self._wait_for_oldest()
            if done % self.every == 0 and self._running:
                self._read_done()
                self._report_if_due()
        self._read_done()

    def _wait_for_oldest(self) -> int:
        step = self._running.popleft()
        before = time.perf_counter()
        step.metrics.loss.block_until_ready()
        at = time.perf_counter()
        if self.waited is not None:
            self.waited(at - before)
        self._done.append((step, at))
        return step.number

    def _read_done(self) -> None:
        for done in self._done:
            self._read(*done)
        self._done.clear()

    def _read(self, step: _Logged, at: float) -> None:
        number = step.number
        metrics = step.metrics
        own = {name: float(np.asarray(local_copy(value))) for name, value in metrics.further.items()}
        loss, grad_norm, weight = (float(np.asarray(local_copy(value))) for value in metrics[:3])  # the cheapest read
        if not self.skips.takes(number, loss, grad_norm):
            self._weight += weight
            self._rows += step.rows or 0
            elapsed = max(at - self._since, 1e-9)
            self._latest = Progress(
                step=number,
                loss=loss,
                grad_norm=grad_norm,
                weight_per_second=self._weight / elapsed,
                rows_per_second=None if step.rows is None else self._rows / elapsed,
                seconds=elapsed / (number - self._counted),
                extra=own | self.skips.figures,
            )
        if number == self._first:  # it includes compilation: start timing at its end
            self._restart_clock(number, at)

    def _report_if_due(self) -> None:
        if self._latest is not None and self._latest.step % self.every == 0:
            self._report({})

    def _report(self, extra: dict[str, float]) -> None:
        if self._latest is None or self._latest.step == self._reported:
            return
        progress = self._latest._replace(extra={**self._latest.extra, **extra})
        self._reported = progress.step
        self._restart_clock(progress.step, time.perf_counter())
        self.on_progress(progress)

    def _restart_clock(self, step: int, at: float) -> None:
        """Restarts the time, the weight and the rows at the end of a step."""
        self._counted = step
        self._since = at
        self._weight = 0.0
        self._rows = 0
