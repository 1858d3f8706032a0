"""Decides at every moment of a process whether a fault is due, notes it, and lets it happen."""

# pyright: reportMissingImports=false

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .actions import ACTIONS
from .faults import Fault, Moment
from .journal import Journal


class Injector:
    """The faults of one process."""

    def __init__(self, faults: Sequence[Fault], rank: int, journal: Journal) -> None:
        """Takes the faults that are this rank's.

        Args:
            faults: Those of the whole run.
            rank: This process.
            journal: Says which were injected before, and is told of every further one.
        """
        self.rank = rank
        self.journal = journal
        self.checkpoints: Path | None = None
        self._faults = {index: fault for index, fault in enumerate(faults) if fault.rank in (None, rank)}
        self._done = Counter(each["index"] for each in journal.events("fault") if each["rank"] == rank)
        self._turn = threading.Lock()

    def has(self, prefix: str) -> bool:
        """Tells whether any fault is meant for phases whose names begin so."""
        return any(fault.phase.startswith(prefix) for fault in self._faults.values())

    def at(self, moment: Moment) -> Moment:
        """Injects what is due at a moment; returns the moment, changed or not, if the process is still there."""
        moment.checkpoints = self.checkpoints
        for index, fault in self._faults.items():
            if self._take(index, fault, moment):
                self.journal.note(
                    "fault", index=index, kind=fault.kind, rank=self.rank, step=moment.step, phase=moment.phase
                )
                ACTIONS[fault.kind](fault, moment)
            elif fault.kind == "slow" and self._is_slow(index, fault, moment):
                ACTIONS[fault.kind](fault, moment)
        return moment

    def _take(self, index: int, fault: Fault, moment: Moment) -> bool:
        if fault.phase != moment.phase or fault.step not in (None, moment.step):
            return False
        with self._turn:
            if self._done[index] >= fault.times:
                return False
            self._done[index] += 1
            return True

    def _is_slow(self, index: int, fault: Fault, moment: Moment) -> bool:
        """Whether a rank that has become slow still is: from its step on, at every one."""
        after = moment.step is not None and moment.step > (fault.step or 0)
        return fault.phase == moment.phase and after and self._done[index] > 0
