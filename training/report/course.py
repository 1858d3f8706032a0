"""The course of a run over its time: what it did when, and what happened on the way, read from goodput.jsonl.

Time is that of all its processes, one after the other; hours between an end in order and the next start do not count.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...layouts.sizes import counted
from ..quantities import is_number
from .charts import Mark

TOGETHER = 0.05
"""Seconds between lines of the ledger that are written together."""


class Stretch(NamedTuple):
    """A piece of time of which the ledger tells.

    Attributes:
        start: Seconds since the run began.
        end: The same.
        seconds: Kind -> seconds of it; they add up to `end - start`.
        step: Steps done at its end.
    """

    start: float
    end: float
    seconds: dict[str, float]
    step: int


class Course(NamedTuple):
    """A run over its time.

    Attributes:
        stretches: One after the other.
        events: Starts but the first, saves, steps that were lost and updates that were left out, each with the seconds
            since the run began.
    """

    stretches: list[Stretch]
    events: list[tuple[float, Mark]]

    @property
    def marks(self) -> list[Mark]:
        """The events alone, by step."""
        return sorted((mark for _, mark in self.events), key=lambda mark: mark.step)

    @property
    def seconds(self) -> float:
        """All time that is known."""
        return self.stretches[-1].end if self.stretches else 0.0


def course_of(lines: Iterable[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]] = ()) -> Course:
    """Reads the course of a run.

    Args:
        lines: Those of goodput.jsonl, as `ledger_lines` gives them.
        metrics: The records of metrics.jsonl, which tell of updates that were left out.
    """
    stretches: list[Stretch] = []
    events: list[tuple[float, Mark]] = []
    saved: set[int] = set()
    step = starts = 0
    for group in _written_together(lines):
        seconds = _by_kind(group)
        begin = stretches[-1].end if stretches else 0.0
        at = begin + seconds.get("restart", 0.0)
        for line in group:
            if line["kind"] == "lost":
                step = line["from"] - 1
                events.append((at, Mark(step, "lost", f"steps {line['from']:,} to {line['to']:,} were lost")))
            starts += line["kind"] == "begin"
            if line["kind"] == "begin" and starts > 1:
                events.append((at, Mark(step, "start", f"start {starts}, after step {step:,}")))
        step = max([step, *(line["to"] for line in group if line["kind"] == "step" and "to" in line)])
        if seconds:
            stretches.append(Stretch(begin, begin + sum(seconds.values()), seconds, step))
        if "save" in seconds and step not in saved:
            saved.add(step)
            events.append((stretches[-1].end, Mark(step, "save", f"save of step {step:,}")))
    return Course(stretches, events + [(_time_of(mark.step, stretches), mark) for mark in _skipped(metrics)])


def _time_of(step: float, stretches: Sequence[Stretch]) -> float:
    """The seconds since the run began at which a step was done for the last time."""
    before = 0.0
    for stretch in reversed(stretches):
        if stretch.step < step:
            break
        before = stretch.end
    return before


def _written_together(lines: Iterable[Mapping[str, Any]]) -> Iterable[list[Mapping[str, Any]]]:
    group: list[Mapping[str, Any]] = []
    for line in lines:
        if group and abs(line["at"] - group[-1]["at"]) > TOGETHER:
            yield group
            group = []
        group.append(line)
    if group:
        yield group


def _by_kind(group: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of each kind; lines of lost steps tell of time that other lines have told of."""
    seconds: dict[str, float] = {}
    for line in group:
        if line["kind"] != "lost" and line["seconds"] > 0:
            seconds[line["kind"]] = seconds.get(line["kind"], 0.0) + line["seconds"]
    return seconds


def _skipped(metrics: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """The records at which more updates were left out than at the one before; a new process counts from 0 again."""
    found, before = [], 0.0
    for record in metrics:
        total = record.get("skipped", 0.0)
        if not (is_number(total) and is_number(record.get("step"))):
            continue
        if total > before:
            left_out = counted(round(total - before), "update")
            found.append(Mark(record["step"], "skipped", f"{left_out} left out until here"))
        before = total
    return found
