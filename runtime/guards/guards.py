"""The guards of one process of a run: watchdog, stragglers, replica comparison, and the ledger of time spent.

A disabled guard is absent: a step makes no call for it.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import jax

from ...checkpoints.replicas import ReplicaCheck
from ...configs.schema import GuardsConfig, Timeouts
from ...mesh.processes import is_main_process
from ...parallel.step.state import TrainState
from ...training.steps.late_log import RUN_AHEAD
from ...training.times import Times, process_age
from ..goodput import GOODPUT, Ledger
from .replica_guard import ReplicaGuard, describe_coverage
from .stragglers import OwnWork, Stragglers
from .watchdog import Watchdog

Item = TypeVar("Item")


class Guards:
    """All guards of this process."""

    def __init__(self, guards: GuardsConfig, timeouts: Timeouts, say: Callable[[str], None]) -> None:
        """Prepares the guards.

        Args:
            guards: The section `guards`.
            timeouts: The section `timeouts`.
            say: Prints a line.
        """
        self._config, self._rendezvous, self._say = guards, timeouts.rendezvous, say
        age = process_age()
        self._began = time.time() - age
        self.times = Times("start", time.monotonic() - age)
        finds_stragglers = guards.stragglers > 0 and jax.process_count() > 1
        limits = (timeouts.step, timeouts.first_step, timeouts.evaluation, timeouts.save)
        self._watches = finds_stragglers or any(limits)
        self._work = OwnWork(guards.straggler_steps) if finds_stragglers else None
        stragglers = Stragglers(guards.stragglers, say) if finds_stragglers else None
        self.watchdog = Watchdog(timeouts, self.times, self._work or (lambda: None), stragglers)
        self._replicas: ReplicaGuard | None = None
        self._ledger: Ledger | None = None
        self._started = 0

    def open(self, check: ReplicaCheck, folder: Path, start: int) -> None:
        """Opens the ledger and compiles the replica comparison. Every process of the run calls this.

        Args:
            check: The comparison for the state of the run.
            folder: The run directory.
            start: Steps done.
        """
        if is_main_process() and self._config.ledger:
            self._ledger = Ledger(folder / GOODPUT, step=start, began=self._began)
        every = self._config.replicas_every
        if check.paths:
            self.times.switch("compile")
            self._replicas = ReplicaGuard(check, folder, every, self._say, seconds=self._rendezvous)
            self.times.switch("start")
        if every:
            self._say(describe_coverage(check, every))
        self.done(start)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the training in a `with` block."""
        with self.watchdog.watching() if self._watches else nullcontext():
            yield
        if self._ledger is not None:
            self._ledger.end()

    def step(self, step: Any) -> Any:
        """Returns the step of the run, watched and measured as the guards require."""
        step = self.watchdog.follow(step) if self._watches else step
        return self._work.calls(step) if self._work else step

    def batches(self, batches: Iterable[Item], start: int) -> Iterator[Item]:
        """Returns the batches of the steps after `start`, each with a note if a guard reads it."""
        if not self._watches and not self._config.ledger:
            return iter(batches)
        noted = self.watchdog.batches(batches, start)
        return self._work.batches(noted) if self._work else noted

    @property
    def waited(self) -> Callable[[float], None] | None:
        """Receives the seconds that the host waited for a step; None without a search for stragglers."""
        return self._work.waited if self._work else None

    @property
    def after_step(self) -> Callable[[int, TrainState], None] | None:
        """Checks a step that was just started; None if no guard needs it."""
        compares = self._replicas is not None and self._config.replicas_every > 0
        return self._after_step if compares or self._ledger is not None else None

    def _after_step(self, number: int, state: TrainState) -> None:
        """Compares replicas and writes the ledger, without waiting for the devices.

        Raises:
            ReplicasDiffer: The state of a few steps ago differed between devices.
        """
        self._started = number
        if self._replicas is not None:
            self._replicas.after_step(number, state)
        if self._ledger is not None and self._ledger.is_due():
            self.done(number - RUN_AHEAD)

    def compare(self, number: int, state: TrainState) -> None:
        """Compares the replicas of a state; every state is compared before it is saved, whatever the config.

        Raises:
            ReplicasDiffer: The state differs between devices.
        """
        if self._replicas is not None:
            self._replicas.compare(number, state)

    def done(self, number: int) -> None:
        """Notes in the ledger that all steps so far are done."""
        if self._ledger is not None:
            self._ledger.add(number, self.times.take())

    def suspend(self) -> None:
        """Stops watching until the next batch is requested, because the run rolls back."""
        self.watchdog.rest()
        self.times.switch("start")
        if self._replicas is not None:
            self._replicas.forget()

    def roll_back(self, step: int) -> None:
        """Notes that the steps after one are computed again."""
        if self._ledger is not None:
            self.done(self._started)
            self._ledger.roll_back(step, self._started)
