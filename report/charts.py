"""Line charts over steps: scales, ticks, and the lines in percent of the plot, which parts.html draws."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ..training.quantities import is_number

MAX_POINTS = 1000
"""Points per line. A longer line keeps the lowest and highest point of each stretch, so spikes stay."""
SMOOTH_FROM = 60
"""Number of points from which a moving average is drawn over the raw line."""
LOGARITHMIC_FROM = 40
"""Ratio of highest to lowest value from which the axis is logarithmic."""
MAX_LOGARITHMIC_LABELS = 7
STRIPE, DOT = 9, 7
"""Pixels: the stripe of one of several lines that coincide, and the diameter of a dot as in report.css."""
RUN_COLORS = 8
MAX_MARKS = 200
"""Marks of one kind that are drawn side by side."""
MARK_NAMES = {"start": "started again", "lost": "went back", "skipped": "update skipped", "save": "save"}
MARK_HEIGHTS = {"save": (100, 94), "skipped": (6, 0)}
"""Start and end of the marks that do not cross the whole plot, in percent from the top."""

Point = tuple[float, float]


class Series(NamedTuple):
    """One line of a chart.

    Attributes:
        name: The name in the legend and the tooltip; may be empty if it is the only line.
        points: (step, value), steps ascending, all finite.
        color: A color of report.css: "train", "eval", "run0" to "run7".
        dashed: Draws the line dashed.
    """

    name: str
    points: list[Point]
    color: str = "train"
    dashed: bool = False


class Reference(NamedTuple):
    """A dashed horizontal line at one finite value."""

    name: str
    value: float


class Mark(NamedTuple):
    """An event at one step.

    Attributes:
        step: The step.
        kind: "start", "save", "skipped" or "lost"; determines the color.
        text: The text of the tooltip.
        at: Seconds since the start of the run.
    """

    step: float
    kind: str
    text: str
    at: float = 0.0


class _Scale(NamedTuple):
    """The ranges of a chart; maps steps and values to percent of the plot, from the top left."""

    steps: tuple[float, float]
    values: tuple[float, float]
    logarithmic: bool

    def x(self, step: float) -> float:
        low, high = self.steps
        return round(100 * (step - low) / (high - low), 2)

    def y(self, value: float) -> float:
        low, high, value = (math.log(v) if self.logarithmic else v for v in (*self.values, value))
        return round(100 * (high - value) / (high - low), 2)

    def value_ticks(self) -> list[float]:
        low, high = self.values
        if not self.logarithmic:
            return ticks(low, high)
        powers = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
        labels = [factor * power for power in powers for factor in (1, 2, 5) if low <= factor * power <= high]
        return labels if len(labels) <= MAX_LOGARITHMIC_LABELS else [power for power in powers if low <= power <= high]


def run_look(number: int) -> tuple[str, bool]:
    """Returns the color of a run among several, and True if its lines are dashed."""
    return f"run{number % RUN_COLORS}", number // RUN_COLORS % 2 == 1


def collect_points(records: Sequence[Mapping[str, Any]], key: str) -> list[Point]:
    """Returns (step, value) of the records of metrics.jsonl in which both are finite numbers."""
    return [
        (record["step"], record[key])
        for record in records
        if is_number(record.get("step")) and is_number(record.get(key))
    ]


def make_chart(
    title: str,
    series: Sequence[Series],
    references: Sequence[Reference] = (),
    *,
    write: Callable[[float], str],
    height: int = 300,
    marks: Sequence[Mark] = (),
) -> dict[str, Any] | None:
    """Prepares a chart for the macro `chart` of parts.html.

    Args:
        title: The title.
        series: The lines; lines without points are left out.
        references: Dashed lines.
        write: Formats a value for the legend and the tooltip.
        height: Height of the plot in pixels; the width is that of the page.
        marks: Events. Those outside the range of the lines are left out, and one of each kind is drawn in one place.

    Returns:
        The values that the template needs; None without points.
    """
    series = [line._replace(points=thin(line.points)) for line in series if line.points]
    if not series:
        return None
    scale = _find_scale(series, references)
    groups = _coinciding(scale, series)
    stripes = {number: (place, len(group)) for group in groups for place, number in enumerate(group)}
    placed = [(scale.x(mark.step), mark) for mark in marks if scale.steps[0] <= mark.step <= scale.steps[1]]
    distinct = list({(mark.kind, round(x * MAX_MARKS / 100)): (x, mark) for x, mark in placed}.values())
    y_labels = [(scale.y(value), _short(value)) for value in scale.value_ticks()]
    notes = [f"in stripes, the same curve: {', '.join(series[number].name for number in group)}" for group in groups]
    return {
        "title": title,
        "height": height,
        "description": " ".join(_describe(line, write) for line in series),
        "lines": [_draw_line(scale, line, write, *stripes.get(n, (0, 1))) for n, line in enumerate(series)],
        "averaged": len(series) > 1 and any(len(line.points) >= SMOOTH_FROM for line in series),
        "notes": notes,
        "label_width": max((len(text) for _, text in y_labels), default=0),
        "y_labels": y_labels,
        "x_labels": [(scale.x(step), _short(step)) for step in ticks(*scale.steps, count=6) if step == int(step)],
        "references": [
            (scale.y(line.value), f"{line.name} {write(line.value)}", _is_below_lines(line, series))
            for line in references
        ],
        "marks": [(mark.kind, x, *MARK_HEIGHTS.get(mark.kind, (100, 0))) for x, mark in distinct],
        "data": {
            "lines": [
                {
                    "name": line.name,
                    "color": line.color,
                    "points": [[step, scale.x(step), write(value)] for step, value in line.points],
                }
                for line in series
            ],
            "marks": [[x, mark.text] for x, mark in distinct],
        },
    }


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Chooses round numbers inside a range.

    Args:
        low: The lower end.
        high: The upper end, above `low`.
        count: The approximate number of ticks.

    Returns:
        Multiples of 1, 2 or 5 times a power of ten, ascending.
    """
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    width = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / width - 1e-9), math.floor(high / width + 1e-9)
    return [round(number * width, 12) for number in range(first, last + 1)]


def thin(points: list[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Drops points that a screen cannot show; keeps the lowest and highest of each stretch, the first and the last.

    Args:
        points: (step, value), steps ascending.
        limit: The maximum number of points, at least 4.
    """
    if len(points) <= limit:
        return points
    edges = [round(i * len(points) / (limit // 2 - 1)) for i in range(limit // 2)]
    kept = {points[0], points[-1]}
    for start, stop in pairwise(edges):
        kept |= {pick(points[start:stop], key=lambda point: point[1]) for pick in (min, max)}
    return sorted(kept)


def smooth(points: list[Point]) -> list[Point]:
    """Averages each point with its neighbors, over a window of a thirtieth of the points."""
    reach = len(points) // 60
    averages = []
    for i, (step, _) in enumerate(points):
        near = min(reach, i, len(points) - 1 - i)  # a symmetric window, so the ends do not lag
        window = points[i - near : i + near + 1]
        averages.append((step, sum(value for _, value in window) / len(window)))
    return averages


def _find_scale(series: Sequence[Series], references: Sequence[Reference]) -> _Scale:
    steps = [step for line in series for step, _ in line.points]
    values = [value for line in series for _, value in line.points] + [line.value for line in references]
    (first, last), (low, high) = ((min(numbers), max(numbers)) for numbers in (steps, values))
    logarithmic = low > 0 and high / low > LOGARITHMIC_FROM
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    value_range = (low / 1.1, high * 1.1) if logarithmic else (low - margin, high + margin)
    return _Scale((first, last if last > first else first + 1), value_range, logarithmic)


def _coinciding(scale: _Scale, series: Sequence[Series]) -> list[list[int]]:
    """Groups the numbers of lines that a reader cannot distinguish; a group has at least two."""
    groups: list[list[int]] = []
    for number, line in enumerate(series):
        same = next((group for group in groups if _coincide(scale, series[group[0]], line)), None)
        if same is None:
            groups.append(same := [])
        same.append(number)
    return [group for group in groups if len(group) > 1]


def _coincide(scale: _Scale, one: Series, other: Series) -> bool:
    heights = {step: scale.y(value) for step, value in one.points}
    shared = [(heights[step], scale.y(value)) for step, value in other.points if step in heights]
    return bool(shared) and all(abs(height - own) < 0.1 for height, own in shared)


def _draw_line(scale: _Scale, line: Series, write: Callable[[float], str], place: int, count: int) -> dict[str, Any]:
    """Lines that coincide take turns in stripes, and their dots are rings around each other."""

    def corners(points: list[Point]) -> str:
        return " ".join(f"{scale.x(step)},{scale.y(value)}" for step, value in points)

    few = len(line.points) < SMOOTH_FROM
    dots = [f"M{scale.x(step)} {scale.y(value)}h0" for step, value in line.points]
    stripes = f"stroke-dasharray:{STRIPE} {STRIPE * (count - 1)};stroke-dashoffset:{-STRIPE * place}"
    return {
        "name": line.name or "last",
        "last": write(line.points[-1][1]),
        "color": line.color,
        "dashed": line.dashed,
        "stripes": stripes if count > 1 else "",
        "corners": corners(line.points if few else smooth(line.points)),
        "raw": "" if few else corners(line.points),
        "dots": "".join(dots) if len(dots) <= SMOOTH_FROM // 2 else "",
        "dot_width": DOT + 4 * (count - 1 - place),
    }


def _describe(line: Series, write: Callable[[float], str]) -> str:
    """Describes a line in words, for screen readers."""
    (first, start), (last, end) = line.points[0], line.points[-1]
    lowest, highest = (write(pick(value for _, value in line.points)) for pick in (min, max))
    ends = f"{write(start)} at step {_short(first)}, {write(end)} at step {_short(last)}"
    return f"{line.name}: " * bool(line.name) + f"{ends}, between {lowest} and {highest}."


def _is_below_lines(reference: Reference, series: Sequence[Series]) -> bool:
    """Returns True if most lines end above a reference, so that its name belongs below it."""
    return 2 * sum(line.points[-1][1] > reference.value for line in series) >= len(series)


def _short(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e4:
        return f"{value / 1000:g}k" if 1e4 <= abs(value) < 1e6 else f"{value:g}".replace("e+0", "e")
    return f"{value:g}"
