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
STRIPE = 9
"""Pixels of the stripe of one of several lines that coincide."""
DOT = 7
"""Pixels of the diameter of a dot, as in report.css."""
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
        low, high = self.values
        if self.logarithmic:
            low = math.log(low)
            high = math.log(high)
            value = math.log(value)
        return round(100 * (high - value) / (high - low), 2)

    def value_ticks(self) -> list[float]:
        low, high = self.values
        if not self.logarithmic:
            return ticks(low, high)
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        powers = [10.0**exponent for exponent in exponents]
        labels = []
        for power in powers:
            labels += [factor * power for factor in (1, 2, 5)]
        labels = [label for label in labels if low <= label <= high]
        if len(labels) <= MAX_LOGARITHMIC_LABELS:
            return labels
        return [power for power in powers if low <= power <= high]


def run_look(number: int) -> tuple[str, bool]:
    """Returns the color of a run among several, and True if its lines are dashed."""
    is_dashed = number // RUN_COLORS % 2 == 1
    return f"run{number % RUN_COLORS}", is_dashed


def collect_points(records: Sequence[Mapping[str, Any]], key: str) -> list[Point]:
    """Returns (step, value) of the records of metrics.jsonl in which both are finite numbers."""
    points = []
    for record in records:
        step = record.get("step")
        value = record.get(key)
        if is_number(step) and is_number(value):
            points.append((step, value))
    return points


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
    y_labels = [(scale.y(value), _short(value)) for value in scale.value_ticks()]
    x_ticks = [step for step in ticks(*scale.steps, count=6) if step == int(step)]
    placed_marks = _place_marks(scale, marks)
    return {
        "title": title,
        "height": height,
        "description": " ".join(_describe(line, write) for line in series),
        "lines": _draw_lines(scale, series, write, groups),
        "averaged": len(series) > 1 and any(len(line.points) >= SMOOTH_FROM for line in series),
        "notes": [_describe_group(series, group) for group in groups],
        "label_width": max((len(text) for _, text in y_labels), default=0),
        "y_labels": y_labels,
        "x_labels": [(scale.x(step), _short(step)) for step in x_ticks],
        "references": [
            (scale.y(line.value), f"{line.name} {write(line.value)}", _is_below_lines(line, series))
            for line in references
        ],
        "marks": [(mark.kind, x, *MARK_HEIGHTS.get(mark.kind, (100, 0))) for x, mark in placed_marks],
        "data": {
            "lines": [_line_data(scale, line, write) for line in series],
            "marks": [[x, mark.text] for x, mark in placed_marks],
        },
    }


def _place_marks(scale: _Scale, marks: Sequence[Mark]) -> list[tuple[float, Mark]]:
    """Returns the marks inside the range of steps with their places; of one kind, the last one in each place."""
    first, last = scale.steps
    placed: dict[tuple[str, int], tuple[float, Mark]] = {}
    for mark in marks:
        if first <= mark.step <= last:
            x = scale.x(mark.step)
            placed[mark.kind, round(x * MAX_MARKS / 100)] = (x, mark)
    return list(placed.values())


def _draw_lines(
    scale: _Scale, series: Sequence[Series], write: Callable[[float], str], groups: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """Draws all lines; those of one group take turns in stripes."""
    stripes: dict[int, tuple[int, int]] = {}
    for group in groups:
        for place, number in enumerate(group):
            stripes[number] = (place, len(group))
    lines = []
    for number, line in enumerate(series):
        place, count = stripes.get(number, (0, 1))
        lines.append(_draw_line(scale, line, write, place, count))
    return lines


def _describe_group(series: Sequence[Series], group: Sequence[int]) -> str:
    names = [series[number].name for number in group]
    return f"in stripes, the same curve: {', '.join(names)}"


def _line_data(scale: _Scale, line: Series, write: Callable[[float], str]) -> dict[str, Any]:
    """Returns the values of a line for the tooltip."""
    points = [[step, scale.x(step), write(value)] for step, value in line.points]
    return {"name": line.name, "color": line.color, "points": points}


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
    first = math.ceil(low / width - 1e-9)
    last = math.floor(high / width + 1e-9)
    return [round(number * width, 12) for number in range(first, last + 1)]


def thin(points: list[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Drops points that a screen cannot show; keeps the lowest and highest of each stretch, the first and the last.

    Args:
        points: (step, value), steps ascending.
        limit: The maximum number of points, at least 4.
    """
    if len(points) <= limit:
        return points
    num_edges = limit // 2
    edges = [round(edge * len(points) / (num_edges - 1)) for edge in range(num_edges)]
    kept = {points[0], points[-1]}
    for start, stop in pairwise(edges):
        stretch = points[start:stop]
        kept.add(min(stretch, key=_value))
        kept.add(max(stretch, key=_value))
    return sorted(kept)


def _value(point: Point) -> float:
    return point[1]


def smooth(points: list[Point]) -> list[Point]:
    """Averages each point with its neighbors, over a window of a thirtieth of the points."""
    reach = len(points) // 60
    averages = []
    for place, (step, _) in enumerate(points):
        side = min(reach, place, len(points) - 1 - place)  # a symmetric window, so the ends do not lag
        window = points[place - side : place + side + 1]
        averages.append((step, sum(map(_value, window)) / len(window)))
    return averages


def _find_scale(series: Sequence[Series], references: Sequence[Reference]) -> _Scale:
    steps: list[float] = []
    values = [line.value for line in references]
    for line in series:
        steps += [step for step, _ in line.points]
        values += [value for _, value in line.points]
    first = min(steps)
    last = max(steps)
    if last == first:
        last = first + 1
    low = min(values)
    high = max(values)
    if low > 0 and high / low > LOGARITHMIC_FROM:
        return _Scale((first, last), (low / 1.1, high * 1.1), logarithmic=True)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return _Scale((first, last), (low - margin, high + margin), logarithmic=False)


def _coinciding(scale: _Scale, series: Sequence[Series]) -> list[list[int]]:
    """Groups the numbers of lines that a reader cannot distinguish; a group has at least two."""
    groups: list[list[int]] = []
    for number, line in enumerate(series):
        for group in groups:
            if _coincide(scale, series[group[0]], line):
                group.append(number)
                break
        else:
            groups.append([number])
    return [group for group in groups if len(group) > 1]


def _coincide(scale: _Scale, first: Series, second: Series) -> bool:
    heights = {step: scale.y(value) for step, value in first.points}
    distances = [abs(scale.y(value) - heights[step]) for step, value in second.points if step in heights]
    return bool(distances) and max(distances) < 0.1


def _draw_line(scale: _Scale, line: Series, write: Callable[[float], str], place: int, count: int) -> dict[str, Any]:
    """Lines that coincide take turns in stripes, and their dots are rings around each other."""

    def corners(points: list[Point]) -> str:
        return " ".join(f"{scale.x(step)},{scale.y(value)}" for step, value in points)

    is_short = len(line.points) < SMOOTH_FROM
    dots = [f"M{scale.x(step)} {scale.y(value)}h0" for step, value in line.points]
    has_dots = len(dots) <= SMOOTH_FROM // 2
    stripes = ""
    if count > 1:
        stripes = f"stroke-dasharray:{STRIPE} {STRIPE * (count - 1)};stroke-dashoffset:{-STRIPE * place}"
    return {
        "name": line.name or "last",
        "last": write(line.points[-1][1]),
        "color": line.color,
        "dashed": line.dashed,
        "stripes": stripes,
        "corners": corners(line.points if is_short else smooth(line.points)),
        "raw": "" if is_short else corners(line.points),
        "dots": "".join(dots) if has_dots else "",
        "dot_width": DOT + 4 * (count - 1 - place),
    }


def _describe(line: Series, write: Callable[[float], str]) -> str:
    """Describes a line in words, for screen readers."""
    first_step, first_value = line.points[0]
    last_step, last_value = line.points[-1]
    values = [value for _, value in line.points]
    start = f"{write(first_value)} at step {_short(first_step)}"
    end = f"{write(last_value)} at step {_short(last_step)}"
    text = f"{start}, {end}, between {write(min(values))} and {write(max(values))}."
    return f"{line.name}: {text}" if line.name else text


def _is_below_lines(reference: Reference, series: Sequence[Series]) -> bool:
    """Returns True if most lines end above a reference, so that its name belongs below it."""
    return 2 * sum(line.points[-1][1] > reference.value for line in series) >= len(series)


def _short(value: float) -> str:
    size = abs(value)
    if value == 0 or 1e-3 <= size < 1e4:
        return f"{value:g}"
    if 1e4 <= size < 1e6:
        return f"{value / 1000:g}k"
    return f"{value:g}".replace("e+0", "e")
