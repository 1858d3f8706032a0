"""Reads the metrics of steps a few steps late, so that the host never waits for a step that has just started."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

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
        tokens_per_second: The weight (tokens, for a language model) per second since the last logged step.
        seconds: The seconds per step since the last logged step.
        extra: The model's own metrics of this step, and those of an evaluation after it.
    """

    step: int
    loss: float
    grad_norm: float
    tokens_per_second: float
    seconds: float
    extra: dict[str, float]


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
        self._running: deque[tuple[int, StepMetrics]] = deque()
        self._done: list[tuple[int, StepMetrics, float]] = []
        self._first = self.start + 1
        self._reported = self.start
        self._latest: Progress | None = None
        self._restart_clock(self.start, time.perf_counter())

    def push(self, number: int, metrics: StepMetrics) -> None:
        """Adds the metrics of a step that has just started; waits for the oldest step if too many are running."""
        self._running.append((number, metrics))
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
        number, metrics = self._running.popleft()
        before = time.perf_counter()
        metrics.loss.block_until_ready()
        at = time.perf_counter()
        if self.waited is not None:
            self.waited(at - before)
        self._done.append((number, metrics, at))
        return number

    def _read_done(self) -> None:
        for done in self._done:
            self._read(*done)
        self._done.clear()

    def _read(self, number: int, metrics: StepMetrics, at: float) -> None:
        own = {name: float(np.asarray(local_copy(value))) for name, value in metrics.further.items()}
        loss, grad_norm, weight = (float(np.asarray(local_copy(value))) for value in metrics[:3])  # the cheapest read
        if not self.skips.takes(number, loss, grad_norm):
            self._weight += weight
            elapsed = max(at - self._since, 1e-9)
            speeds = self._weight / elapsed, elapsed / (number - self._counted)
            self._latest = Progress(number, loss, grad_norm, *speeds, own | self.skips.figures)
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
        """Restarts the time and the weight at the end of a step."""
        self._counted, self._since, self._weight = step, at, 0.0
