"""The metrics of steps, read a few steps late, when they are long done: the host waits for no step just started."""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ...mesh.processes import local_copy
from ...parallel.step.state import StepMetrics
from .not_finite import Skips

RUN_AHEAD = 2
"""Steps that may be under way or waiting on the devices before the host waits for the oldest."""
READ_TOGETHER = 4
"""Finished steps whose metrics are read at once: the first read after other work costs the host more than the rest."""


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


class LateLog:
    """Reads metrics of steps that are done, checks them, and reports some."""

    def __init__(
        self,
        start: int,
        every: int,
        on_progress: Callable[[Progress], None],
        waited: Callable[[float], None] | None,
        skips: Skips,
    ) -> None:
        """Begins to read, and the clock.

        Args:
            start: Steps done.
            every: Reports each step whose number is a multiple of this.
            on_progress: Called with the figures of a reported step.
            waited: Called with the seconds that the host has waited for a step; None calls nothing.
            skips: Counts those that are not finite, whose figures are not reported.
        """
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
