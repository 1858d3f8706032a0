"""The time split of a run: its sums, its course over the time of the run, and the events, read from goodput.jsonl.

The time is that of all processes, one after the other; the time between a regular end and the next start is not
included.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ..mesh.errors import counted
from ..runtime.goodput import KINDS, Goodput
from ..training.quantities import duration
from .charts import Mark, collect_points, ticks

TOGETHER = 0.05
"""Maximum seconds between lines of the ledger that were written together."""
BINS = 160
"""Number of intervals that are drawn."""
MAX_EVENTS = 50
"""Events in the description for screen readers."""
NAMES = {
    "step": "steps that count",
    "lost": "steps computed again",
    "data": "waiting for data",
    "evaluation": "evaluations",
    "save": "blocked by saves",
    "compile": "compiling",
    "start": "starting",
    "restart": "not running",
}
"""Kind -> name."""


class Stretch(NamedTuple):
    """An interval of the ledger.

    Attributes:
        start: Seconds since the start of the run.
        end: Seconds at its end, likewise.
        seconds: Kind -> seconds; they add up to `end - start`.
        step: Steps done at the end.
    """

    start: float
    end: float
    seconds: dict[str, float]
    step: int


class Course(NamedTuple):
    """The time split over the time of a run.

    Attributes:
        stretches: Consecutive intervals.
        events: Restarts, saves, lost steps and skipped updates.
    """

    stretches: list[Stretch]
    events: list[Mark]

    @property
    def seconds(self) -> float:
        """The total time."""
        return self.stretches[-1].end if self.stretches else 0.0


def course_of(lines: Iterable[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]] = ()) -> Course:
    """Reads the course of a run.

    Args:
        lines: The lines of goodput.jsonl from `ledger_lines`.
        metrics: The records of metrics.jsonl, which contain the skipped updates.
    """
    stretches: list[Stretch] = []
    events: list[Mark] = []
    saved: set[int] = set()
    step = 0
    starts = 0
    for group in _group_by_time(lines):
        seconds = _seconds_by_kind(group)
        begin = stretches[-1].end if stretches else 0.0
        at = begin + seconds.get("restart", 0.0)
        for line in group:
            if line["kind"] == "lost":
                step = line["from"] - 1
                events.append(Mark(step, "lost", f"steps {line['from']:,} to {line['to']:,} were lost", at))
            elif line["kind"] == "begin":
                starts += 1
                if starts > 1:
                    events.append(Mark(step, "start", f"start {starts}, after step {step:,}", at))
        for line in group:
            if line["kind"] == "step" and "to" in line:
                step = max(step, line["to"])
        if seconds:
            stretches.append(Stretch(begin, begin + sum(seconds.values()), seconds, step))
        if "save" in seconds and step not in saved:
            saved.add(step)
            events.append(Mark(step, "save", f"save of step {step:,}", stretches[-1].end))
    skipped = [mark._replace(at=_time_of(mark.step, stretches)) for mark in _skipped_updates(metrics)]
    return Course(stretches, events + skipped)


def _seconds_by_kind(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Adds up the seconds of some lines by kind; lost steps are already in earlier lines."""
    seconds: dict[str, float] = {}
    for line in lines:
        kind = line["kind"]
        if kind != "lost" and line["seconds"] > 0:
            seconds[kind] = seconds.get(kind, 0.0) + line["seconds"]
    return seconds


def shares(goodput: Goodput) -> list[tuple[str, str, float, str]]:
    """Returns (kind, name, percent, duration) of every kind with some time, in the order of display."""
    total = goodput.total or 1.0
    rows = []
    for kind in KINDS:
        seconds = goodput.seconds.get(kind, 0.0)
        if seconds > 0:
            rows.append((kind, NAMES[kind], 100 * seconds / total, duration(seconds)))
    return rows


def make_timeline(course: Course) -> dict[str, Any] | None:
    """Prepares the timeline for the macro `timeline` of parts.html; None if too little is known."""
    if course.seconds <= 0 or len(course.stretches) < 3:
        return None
    bins = divide(course.stretches, BINS)
    areas = [(kind, _area(bins, kind)) for kind in KINDS]
    events: dict[tuple[str, int], tuple[str, str, str]] = {}
    for mark in course.events:
        place = BINS * min(mark.at / course.seconds, 1.0)
        events[mark.kind, round(place)] = (mark.kind, f"{place:.2f}", mark.text)
    sentences = [f"{duration(course.seconds)} in total"]
    sentences += [f"{duration(mark.at)}: {mark.text}" for mark in course.events[:MAX_EVENTS]]
    labels = []
    for at in ticks(0, course.seconds, count=4):
        if at <= 0.96 * course.seconds:
            labels.append((round(100 * at / course.seconds, 2), duration(at) if at else "0"))
    return {
        "bins": BINS,
        "areas": [(kind, area) for kind, area in areas if area],
        "description": ". ".join(sentences) + ".",
        "events": list(events.values()),
        "labels": labels,
    }


def divide(stretches: Sequence[Stretch], count: int) -> list[dict[str, float]]:
    """Divides the time of a run into intervals of equal length.

    Args:
        stretches: Consecutive intervals, from 0.
        count: The number of equal intervals.

    Returns:
        For each interval, kind -> share; the shares add up to 1.
    """
    width = stretches[-1].end / count
    bins: list[dict[str, float]] = [{} for _ in range(count)]
    for stretch in stretches:
        first = int(stretch.start / width)
        last = min(int(stretch.end / width), count - 1)
        for place in range(first, last + 1):
            overlap = min(stretch.end, (place + 1) * width) - max(stretch.start, place * width)
            part = max(overlap, 0.0) / width / max(stretch.end - stretch.start, 1e-12)
            for kind, seconds in stretch.seconds.items():
                bins[place][kind] = bins[place].get(kind, 0.0) + part * seconds
    return bins


def _area(bins: Sequence[dict[str, float]], kind: str) -> str:
    """Returns the SVG path of one kind in all intervals, stacked on the kinds before it."""
    below = KINDS[: KINDS.index(kind)]
    corners = []
    for place, split in enumerate(bins):
        height = 100 * split.get(kind, 0.0)
        if height >= 0.1:
            bottom = 100 * (1 - sum(split.get(lower, 0.0) for lower in below))
            corners.append(f"M{place} {bottom:.1f}h1v{-height:.1f}h-1z")
    return "".join(corners)


def _time_of(step: float, stretches: Sequence[Stretch]) -> float:
    """Returns the seconds since the start of the run at which a step was done for the last time."""
    before = 0.0
    for stretch in reversed(stretches):
        if stretch.step < step:
            break
        before = stretch.end
    return before


def _group_by_time(lines: Iterable[Mapping[str, Any]]) -> Iterable[list[Mapping[str, Any]]]:
    group: list[Mapping[str, Any]] = []
    for line in lines:
        if group and abs(line["at"] - group[-1]["at"]) > TOGETHER:
            yield group
            group = []
        group.append(line)
    if group:
        yield group


def _skipped_updates(metrics: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """Returns the records with more skipped updates than the record before; a new process counts from 0 again."""
    points = [(0, 0.0), *collect_points(metrics, "skipped")]
    marks = []
    for (_, before), (step, total) in pairwise(points):
        if total > before:
            marks.append(Mark(step, "skipped", f"{counted(round(total - before), 'update')} skipped so far"))
    return marks
