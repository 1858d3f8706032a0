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
                  is 1 where the same process went back, as a value was not finite
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

NAME = "goodput.jsonl"
KINDS = ("step", "lost", "data", "evaluation", "save", "compile", "start", "restart")
"""In the order in which they are shown."""
FLUSH_SECONDS = 1.0


class Steps(NamedTuple):
    """Steps that one line tells of.

    Attributes:
        first: the first.
        last: the last.
        seconds: of all of them.
    """

    first: int
    last: int
    seconds: float


class Goodput(NamedTuple):
    """The time of a run by kind.

    Attributes:
        seconds: kind -> seconds, those of "lost" not among those of "step".
        starts: how often a process began to train.
        lost_steps: how many steps were computed again.
        rollbacks: how often the run went back without a new start.
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
        """Of all seconds, those of steps that count; 0 where there are none."""
        return self.seconds.get("step", 0.0) / self.total if self.total > 0 else 0.0

    def __str__(self) -> str:
        others = {kind: seconds / self.total for kind, seconds in self.seconds.items() if kind != "step" and self.total}
        parts = [f"{kind} {100 * share:.1f} %" for kind, share in sorted(others.items(), key=lambda each: -each[1])]
        shown = f" ({', '.join(part for part in parts if not part.endswith(' 0.0 %'))})" if others else ""
        starts = f", {self.starts} starts" if self.starts > 1 else ""
        lost = f", {counted(self.lost_steps, 'step')} computed again" if self.lost_steps else ""
        back = f", {self.rollbacks} rollback{'s' if self.rollbacks > 1 else ''}" if self.rollbacks else ""
        return f"Goodput {100 * self.share:.1f} % of {self.total:.1f} s{starts}{back}{lost}{shown}."


class Ledger:
    """Adds the lines of one process, process 0 of the run; a context manager."""

    def __init__(self, path: Path, *, step: int, seen: int = 0, began: float | None = None) -> None:
        """Opens the ledger of a run, and says what was lost since the process before.

        Args:
            path: The file; its folder exists.
            step: Steps done in the state that this process starts from.
            seen: The last step that metrics.jsonl told of before.
            began: When this process began, Unix seconds; None = now.
        """
        began = time.time() if began is None else began
        history = _History(ledger_lines(path))
        self._path = path
        self._done = step
        self._flushed = time.monotonic()
        self._file = -1
        with suppress(OSError):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            _end_last_line(self._file)
        if history.starts and not history.ended:
            self._write("restart", max(0.0, began - history.at), at=began)
        last = max(seen, history.last_step)
        if last > step:
            seconds = sum(each.seconds for each in history.after(step))
            self._write("lost", seconds, at=began, **{"from": step + 1, "to": last})
        self._write("begin", 0.0)

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def is_due(self) -> bool:
        """True if new lines are due."""
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
                self._done = step
            elif spent >= 0.0005:
                self._write(kind, spent)

    def roll_back(self, step: int, last: int) -> None:
        """Says that this process goes back.

        Args:
            step: Steps done in the state that it goes back to.
            last: The last step that it had begun.
        """
        seconds = sum(each.seconds for each in _History(ledger_lines(self._path)).after(step))
        self._write("lost", seconds, **{"from": step + 1, "to": last, "rollbacks": 1})
        self._done = step

    def end(self) -> None:
        """Says that this process ends in order."""
        self._write("end", 0.0)

    def _write(self, kind: str, seconds: float, at: float | None = None, **more: int) -> None:
        line = {"kind": kind, "seconds": round(seconds, 4), "at": round(time.time() if at is None else at, 3), **more}
        if self._file >= 0:
            with suppress(OSError):
                os.write(self._file, (json.dumps(line) + "\n").encode())


def read_goodput(path: Path) -> Goodput | None:
    """Sums a ledger up; None where there is none.

    Args:
        path: The file; lines that are cut short are left out.
    """
    history = _History(ledger_lines(path))
    if not history.seconds:
        return None
    return Goodput(history.seconds, history.starts, history.lost_steps, history.rollbacks)


class _History:
    """The sums of the lines of a ledger."""

    def __init__(self, lines: Iterator[dict[str, Any]]) -> None:
        self.seconds: dict[str, float] = {}
        self.starts, self.lost_steps, self.rollbacks = 0, 0, 0
        self.at, self.ended = 0.0, False
        self._kept: list[Steps] = []
        for line in lines:
            self._take(line)
        self.seconds = {kind: self.seconds[kind] for kind in KINDS if self.seconds.get(kind, 0.0) > 0}

    @property
    def last_step(self) -> int:
        """The last step of the course that the run is on; 0 before the first."""
        return max((each.last for each in self._kept), default=0)

    def after(self, step: int) -> list[Steps]:
        """Returns the time of the steps after a step; a line that spans it counts in proportion."""
        found = []
        for each in self._kept:
            first = max(each.first, step + 1)
            share = (each.last - first + 1) / (each.last - each.first + 1)
            found += [Steps(first, each.last, each.seconds * share)] if share > 0 else []
        return found

    def _take(self, line: Mapping[str, Any]) -> None:
        kind, seconds = line["kind"], line["seconds"]
        self.at = line["at"]
        self.ended = kind == "end"
        self.starts += kind == "begin"
        if kind == "lost":
            self.rollbacks += line.get("rollbacks") == 1
            self._lose(line["from"] - 1, line["to"])
            return
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds
        if kind == "step" and "from" in line:
            self._kept.append(Steps(line["from"], line["to"], seconds))

    def _lose(self, step: int, last: int) -> None:
        lost = sum(each.seconds for each in self.after(step))
        self.seconds["step"] = self.seconds.get("step", 0.0) - lost
        self.seconds["lost"] = self.seconds.get("lost", 0.0) + lost
        self.lost_steps += last - step
        before = [(each, min(each.last, step)) for each in self._kept if each.first <= step]
        self._kept = [
            Steps(each.first, end, each.seconds * (end - each.first + 1) / (each.last - each.first + 1))
            for each, end in before
        ]


def ledger_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a ledger that are whole, in the order written; none where there is no file.

    Args:
        path: The file.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for each in text.splitlines():
        with suppress(ValueError):
            line = json.loads(each)
            if isinstance(line, dict) and _is_whole(line):
                yield line


def _is_whole(line: Mapping[str, Any]) -> bool:
    numbers = [line.get("seconds"), line.get("at")]
    steps = [line.get("from"), line.get("to")]
    if not (isinstance(line.get("kind"), str) and all(type(number) in (int, float) for number in numbers)):
        return False
    if all(type(step) is int for step in steps):
        return 1 <= line["from"] <= line["to"]
    return steps == [None, None] and line["kind"] != "lost"


def _end_last_line(file: int) -> None:
    """Ends a line that a kill has cut short, so that the next stands alone."""
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        os.write(file, b"\n")
