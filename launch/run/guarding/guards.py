"""What watches one process of a run while it trains: the watchdog, slow processes, equal copies, where time goes.

What the config turns off is not there: a step makes no call for it.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import jax

from ....configs.schema import Config
from ....mesh.processes import is_main_process
from ....parallel.step.state import TrainState
from ....training.goodput import NAME, Goodput, Ledger, read_goodput
from ....training.metrics import read_metrics
from ....training.steps.late_log import RUN_AHEAD
from ....training.times import Times, process_age
from ....training.watching.replicas import ReplicaCheck
from ....training.watching.stragglers import OwnWork, Stragglers
from ....training.watching.watchdog import Watchdog
from ..build import Built
from .replica_guard import ReplicaGuard, coverage

Item = TypeVar("Item")


class Guards:
    """All that watches this process; what the config turns off costs nothing."""

    def __init__(self, config: Config, say: Callable[[str], None], compared: Callable[[int], bool]) -> None:
        """Prepares to watch.

        Args:
            config: Of the run.
            say: Gets a line for people.
            compared: Whether `compare` is called after a step, before its state is saved.
        """
        self._config, self._say, self._compared = config, say, compared
        age = process_age()
        self._began = time.time() - age
        self.times = Times("start", time.monotonic() - age)
        guards, timeouts = config.guards, config.timeouts
        looks = guards.stragglers > 0 and jax.process_count() > 1
        deadlines = (timeouts.step, timeouts.first_step, timeouts.evaluation, timeouts.save)
        self._watches = looks or any(deadlines)
        self._work = OwnWork(guards.straggler_steps) if looks else None
        self.watchdog = Watchdog(
            timeouts.step,
            {"first_step": timeouts.first_step, "evaluation": timeouts.evaluation, "save": timeouts.save},
            times=self.times,
            work=self._work or (lambda: None),
            stragglers=Stragglers(guards.stragglers, say) if looks else None,
        )
        self._replicas: ReplicaGuard | None = None
        self._ledger: Ledger | None = None
        self._started = 0

    def open(self, built: Built, folder: Path, start: int) -> None:
        """Makes ready what needs the run and its folder. Every process of the run calls this.

        Args:
            built: The run.
            folder: Where it lives; metrics.jsonl is still as the process before left it.
            start: Steps done.
        """
        if is_main_process() and self._config.guards.ledger:
            seen = _last_step(folder / "metrics.jsonl")
            self._ledger = Ledger(folder / NAME, step=start, seen=seen, began=self._began)
        every = self._config.guards.replicas_every
        check = ReplicaCheck(built.step.abstract_state())
        if check.paths:
            self.times.switch("compile")
            seconds = self._config.timeouts.rendezvous
            self._replicas = ReplicaGuard(check, folder, every, self._say, seconds=seconds)
            self.times.switch("start")
        if every:
            self._say(coverage(check, every))
        self._add(start)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches for a `with` block in which training happens; when it ends in order, the ledger is closed."""
        try:
            with self.watchdog.watching() if self._watches else nullcontext():
                yield
            if self._ledger is not None:
                self._ledger.end()
        finally:
            if self._ledger is not None:
                self._ledger.close()

    def step(self, step: Any) -> Any:
        """The step of the run: followed if anything watches, and measured if somebody looks for slow processes."""
        step = self.watchdog.follow(step) if self._watches else step
        return self._work.calls(step) if self._work else step

    def batches(self, batches: Iterable[Item], start: int) -> Iterator[Item]:
        """The batches of the steps after `start`, each with its note where somebody reads them."""
        if not self._watches and not self._config.guards.ledger:
            return iter(batches)
        noted = self.watchdog.batches(batches, start)
        return self._work.batches(noted) if self._work else noted

    @property
    def waited(self) -> Callable[[float], None] | None:
        """Takes the seconds that the host has waited for a step; None where nobody looks for slow processes."""
        return self._work.waited if self._work else None

    @property
    def took(self) -> Callable[[float], None] | None:
        """Takes the seconds that a batch took in the background; None where nobody looks for slow processes."""
        return self._work.took if self._work else None

    @property
    def after_step(self) -> Callable[[int, TrainState], None] | None:
        """Looks at a step that was just started, as `run_steps` asks for it; None where nothing looks."""
        compares = self._replicas is not None and self._config.guards.replicas_every > 0
        return self._look if compares or self._ledger is not None else None

    def _look(self, number: int, state: TrainState) -> None:
        """Waits for nothing that is not there.

        Raises:
            ReplicasDiffer: The state of a few steps ago was not the same on all devices.
        """
        self._started = number
        if self._replicas is not None:
            self._replicas.after_step(number, state, later=self._compared(number))
        if self._ledger is not None and self._ledger.is_due():
            self._add(number - RUN_AHEAD)

    def compare(self, number: int, state: TrainState) -> None:
        """Compares the copies of a state; every state is compared before it is saved, whatever the config.

        Raises:
            ReplicasDiffer: It is not the same on all devices.
        """
        if self._replicas is not None:
            self._replicas.compare(number, state)

    def done(self, number: int) -> None:
        """Notes that all steps so far are done."""
        if self._ledger is not None:
            self._add(number)

    def rests(self) -> None:
        """Notes that the run goes back: nothing is watched until the next batch is asked for."""
        self.watchdog.rest()
        self.times.switch("start")
        if self._replicas is not None:
            self._replicas.forget()

    def roll_back(self, step: int) -> None:
        """Notes that the steps after one are computed again."""
        if self._ledger is not None:
            self._add(self._started)
            self._ledger.roll_back(step, self._started)

    def _add(self, number: int) -> None:
        if self._ledger is not None:
            self._ledger.add(number, self.times.take())


def goodput(folder: Path) -> Goodput | None:
    """Where the time of a run went, as far as its folder tells."""
    return read_goodput(folder / NAME)


def _last_step(path: Path) -> int:
    """The last step that metrics.jsonl tells of; 0 where there is none."""
    with suppress(OSError):
        return max((record.get("step", 0) for record in read_metrics(path)), default=0)
    return 0
