"""goodput.jsonl: where the time of a run went, over all its starts, and how much of it were steps that count.

One JSON object a line: a kind, its seconds, and the time of day at its end (Unix seconds).

    begin         a process begins to train
    start         from the start of the process until training begins: joining, building, restoring
    compile       compiling the step
    data          the host waited for a batch
    step          steps, `from` and `to`
    evaluation    evaluations between steps
    save          what a save held up
    restart       nothing ran: from the last line of a process that died to the start of the next
    lost          steps computed again, `from` and `to`: their seconds are in earlier lines of kind "step"; `rollbacks`
                  is 1 if the same process rolled back
    end           the process ended in order; what comes after is no restart

    goodput = (seconds of "step" - seconds of "lost") / seconds of all kinds but "lost"

Lines are added as the run goes on, so a kill loses about a second, which then counts as restart. A file system that
cannot be written to costs lines and nothing else.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..mesh.errors import counted

GOODPUT = "goodput.jsonl"
KINDS = ("step", "lost", "data", "evaluation", "save", "compile", "start", "restart")
"""In the order in which they are shown."""
FLUSH_SECONDS = 1.0


class Goodput(NamedTuple):
    """The time of a run by kind.

    Attributes:
        seconds: Kind -> seconds; those of "lost" are not part of "step".
        starts: The number of processes that began to train.
        lost_steps: The number of steps that were computed again.
        rollbacks: The number of rollbacks without a new start.
    """

    seconds: dict[str, float]
    starts: int
    lost_steps: int
    rollbacks: int = 0

    @property
    def total(self) -> float:
        """All seconds."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """The share of all seconds spent on steps that count; 0 if there are none."""
        return self.seconds.get("step", 0.0) / self.total if self.total > 0 else 0.0

    def __str__(self) -> str:
        others = {kind: seconds / self.total for kind, seconds in self.seconds.items() if kind != "step" and self.total}
        parts = [f"{kind} {100 * share:.1f} %" for kind, share in sorted(others.items(), key=lambda each: -each[1])]
        shown = f" ({', '.join(part for part in parts if not part.endswith(' 0.0 %'))})" if others else ""
        starts = f", {self.starts} starts" if self.starts > 1 else ""
        lost = f", {counted(self.lost_steps, 'step')} computed again" if self.lost_steps else ""
        back = f", {counted(self.rollbacks, 'rollback')}" if self.rollbacks else ""
        return f"Goodput {100 * self.share:.1f} % of {self.total:.1f} s{starts}{back}{lost}{shown}."


class Steps(NamedTuple):
    """Consecutive steps, and the seconds that all of them took."""

    first: int
    last: int
    seconds: float


class Ledger:
    """Adds the lines of process 0 of the run."""

    def __init__(self, path: Path, *, step: int, began: float) -> None:
        """Begins the lines of this process, and records what was lost since the previous process.

        Args:
            path: The file; its directory exists.
            step: Steps done in the state that this process starts from.
            began: The start of this process, in Unix seconds.
        """
        self._done = step
        self._flushed = time.monotonic()
        self._steps: list[Steps] = []
        lines = list(ledger_lines(path))
        for line in lines:
            if line["kind"] == "step" and "from" in line:  # without, it is of a step that is not done yet
                self._steps.append(Steps(line["from"], line["to"], line["seconds"]))
            elif line["kind"] == "lost":
                self._drop_after(line["from"] - 1)
        self._path = path
        if _read_text(path)[-1:] not in ("", "\n"):  # a kill has cut the last line short
            self._append("\n")
        if lines and lines[-1]["kind"] != "end":
            self._write("restart", max(0.0, began - lines[-1]["at"]), at=began)
        last = max((each.last for each in self._steps), default=0)
        if last > step:
            self._write("lost", self._drop_after(step), at=began, **{"from": step + 1, "to": last})
        self._write("begin", 0.0)

    def is_due(self) -> bool:
        """Returns True if new lines are due."""
        return time.monotonic() - self._flushed >= FLUSH_SECONDS

    def add(self, step: int, seconds: Mapping[str, float]) -> None:
        """Adds a line for every kind.

        Args:
            step: Steps done.
            seconds: Kind -> seconds since the last call.
        """
        self._flushed = time.monotonic()
        for kind, spent in seconds.items():
            if kind == "step" and step > self._done:
                self._write(kind, spent, **{"from": self._done + 1, "to": step})
                self._steps.append(Steps(self._done + 1, step, spent))
                self._done = step
            elif spent >= 0.0005:
                self._write(kind, spent)

    def roll_back(self, step: int, last: int) -> None:
        """Records that this process rolls back.

        Args:
            step: Steps done in the state that it returns to.
            last: The last step that it had begun.
        """
        self._write("lost", self._drop_after(step), **{"from": step + 1, "to": last, "rollbacks": 1})
        self._done = step

    def end(self) -> None:
        """Records that this process ends normally."""
        self._write("end", 0.0)

    def _drop_after(self, step: int) -> float:
        """Drops the steps after one, and returns their seconds; of a line that spans it, in proportion."""
        steps, self._steps, dropped = self._steps, [], 0.0
        for each in steps:
            kept = min(max(step + 1 - each.first, 0) / (each.last + 1 - each.first), 1.0)
            dropped += each.seconds * (1 - kept)
            if kept:
                self._steps.append(Steps(each.first, min(each.last, step), each.seconds * kept))
        return dropped

    def _write(self, kind: str, seconds: float, at: float | None = None, **more: int) -> None:
        line = {"kind": kind, "seconds": round(seconds, 4), "at": round(time.time() if at is None else at, 3), **more}
        self._append(json.dumps(line) + "\n")

    def _append(self, text: str) -> None:
        with suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            with open(descriptor, "a", encoding="utf-8") as file:
                file.write(text)


def read_goodput(path: Path) -> Goodput | None:
    """Returns the sums of a ledger; None if it is missing or empty."""
    seconds = dict.fromkeys(KINDS, 0.0)
    starts = lost_steps = rollbacks = 0
    for line in ledger_lines(path):
        kind = line["kind"]
        if kind in seconds:
            seconds[kind] += line["seconds"]
        if kind == "begin":
            starts += 1
        elif kind == "lost":
            seconds["step"] -= line["seconds"]
            lost_steps += line["to"] - line["from"] + 1
            rollbacks += line.get("rollbacks", 0)
    found = {kind: value for kind, value in seconds.items() if value > 0}
    return Goodput(found, starts, lost_steps, rollbacks) if found else None


def ledger_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of a ledger in order, without those that were cut short; none if the file is missing."""
    for line in _read_text(path).splitlines():
        with suppress(ValueError):
            yield json.loads(line)


def _read_text(path: Path) -> str:
    """Returns the content of a file; "" if it is missing or cannot be read."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
