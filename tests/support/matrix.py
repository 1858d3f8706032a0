"""Runs of the failure matrix: a small config in 2 or 4 processes of 2 devices each, with faults, until it is as if
nothing had been."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.cluster import Ended, cluster
from support.faults import Fault, Journal
from support.runs import environment, same_run, write_config
from support.soak import recoveries

STEPS = 16
DEVICES = 2
ROOM = 15.0
"""Seconds on top of a bound, for a machine with much else to do; the bounds are held where it is idle."""
DEAD, HUNG = 5.0, 5.0
"""Bounds: until all have ended after a death, and after the deadline of a step."""
DEADLINE = 6
"""timeouts.step of runs that hang."""


def small(folder: Path, processes: int = 2, **sections: Any) -> Path:
    """The config of a run in so many processes of 2 devices, saved every 4 steps, evaluated every 8.

    Each process has shards of its own, so each writes in a save.
    """
    options: dict[str, Any] = {
        "run": {"log_every": 1},
        "strategy": {"fsdp": {"size": DEVICES * processes, "floor_bytes": 256}},
        "train": {"steps": STEPS, "global_batch": 16},
        "checkpoint": {"every": 4, "keep": 3},
        "eval": {"every": 8, "batches": 2},
        "timeouts": {"rendezvous": 60, "heartbeat": 30},
    }
    return write_config(folder, **{**options, **sections})


class UnderFaults:
    """A run in a folder of its own, started as often as it takes; faults come once over all of that."""

    def __init__(self, folder: Path, faults: Sequence[Fault], processes: int = 2, **sections: Any) -> None:
        self.folder = folder / "run"
        self.config = small(folder, processes, **sections)
        self.journal = Journal(folder / "journal.jsonl")
        self._path = folder / "journal.jsonl"
        self._faults, self._processes = faults, processes

    def started(self, restarts: int = 0, overrides: Sequence[str] = (), **variables: str):
        """The `cluster` of one launch."""
        return cluster(
            self.config,
            processes=self._processes,
            devices=DEVICES,
            faults=self._faults,
            restarts=restarts,
            overrides=overrides,
            environment=environment(**variables),
            journal=self._path,
        )

    def launch(self, restarts: int = 0, overrides: Sequence[str] = ()) -> Ended:
        """One launch, to its end."""
        with self.started(restarts, overrides) as run:
            return run.wait(600)

    def launch_until_done(self, *endings: tuple[int, str], restarts: int = 0) -> list[Ended]:
        """Launches once for each exit code, with a pattern of the output; the last is the end of the run."""
        found = []
        for code, pattern in endings:
            found.append(ended := self.launch(restarts))
            assert ended.code == code, (pattern, ended)
            assert re.search(pattern, ended.stdout + ended.stderr), (pattern, ended)
        return found

    def log(self, rank: int) -> str:
        """What a rank has printed, over all attempts."""
        return (self.folder / "logs" / f"rank-{rank}.log").read_text(encoding="utf-8", errors="replace")

    def detected(self) -> list[float]:
        """For every fault that ended an attempt: seconds to the end of all processes."""
        return [each.detected for each in recoveries(self.journal) if each.detected is not None]

    def causes(self) -> list[tuple[int, str, int]]:
        """For every attempt that ended badly: which rank was named, how it ended, the exit code."""
        ended = [event for event in self.journal.events("ended") if event["cause"]]
        return [(event["cause"][0], event["cause"][1], event["code"]) for event in ended]


def assert_same(found: UnderFaults, expected: Path) -> None:
    """Every loss and every bit of the last checkpoint are those of the undisturbed run."""
    assert same_run(found.folder, expected) == []
    print("\n".join(map(str, recoveries(found.journal))))  # the figures of docs/failures.md
