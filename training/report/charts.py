"""Line charts as HTML: SVG lines that stretch with the page, and text that does not."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from ..quantities import is_number
from .page import visible

MAX_POINTS = 1000
"""Points drawn per line; of more, the lowest and highest of each stretch are kept, so spikes stay."""
SMOOTH_FROM = 60
"""Points from which a moving average is drawn over the raw line."""
LOGARITHMIC_FROM = 40
"""Highest by lowest value from which the axis is logarithmic."""
SIDE = 1000
"""The drawing's own units, across and down."""

Point = tuple[float, float]


class Series(NamedTuple):
    """One line of a chart.

    Attributes:
        name: Its name in the legend and the tooltip; may be empty where it is alone.
        points: (step, value), steps ascending, all finite.
        kind: "train" or "eval" choose the color; dots are added where there are few points.
    """

    name: str
    points: list[Point]
    kind: Literal["train", "eval"] = "train"


class Reference(NamedTuple):
    """A dashed line at one value.

    Attributes:
        name: What has this value.
        value: A finite number.
    """

    name: str
    value: float


def chart(
    title: str,
    series: Sequence[Series],
    references: Sequence[Reference] = (),
    *,
    write: Callable[[float], str],
    height: int = 300,
) -> str:
    """Draws lines over steps.

    Args:
        title: What the values are.
        series: Lines; those without points are left out.
        references: Dashed lines.
        write: Writes a value of the legend and of the tooltip.
        height: Pixels of the plot; the width is that of the page.

    Returns:
        HTML; "" where there is no point at all.
    """
    series = [line._replace(points=thinned(line.points)) for line in series if line.points]
    if not series:
        return ""
    frame = _frame(series, references)
    return (
        f'<figure class="chart"><figcaption><b>{visible(title)}</b> {_legend(series, write)}</figcaption>'
        f'<div class="plot" style="height:{height}px;--label:{_widest(frame)}ch">{_labels(frame, references, write)}'
        f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" role="img" aria-label="{visible(title)}">'
        f"{_grid(frame)}{''.join(_line(frame, line) for line in series)}{_dashes(frame, references)}</svg>"
        f'<script type="application/json">{_data(frame, series, write)}</script></div></figure>'
    )


def points_of(records: Sequence[Mapping[str, Any]], key: str) -> list[Point]:
    """Collects a line from the records of metrics.jsonl.

    Args:
        records: In the order of their steps; any key may be missing or not finite.
        key: Of the values.

    Returns:
        (step, value) of the records that have both.
    """
    return [
        (record["step"], record[key])
        for record in records
        if is_number(record.get("step")) and is_number(record.get(key))
    ]


def thinned(points: list[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Leaves out points that a screen cannot show, keeping the lowest and highest of each stretch, first and last.

    Args:
        points: (step, value), steps ascending.
        limit: Most points to keep, at least 4.

    Returns:
        At most `limit` of the points, in order.
    """
    if len(points) <= limit:
        return points
    edges = [round(i * len(points) / (limit // 2 - 1)) for i in range(limit // 2)]
    kept = {points[0], points[-1]}
    for start, stop in pairwise(edges):
        stretch = points[start:stop]
        kept |= {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
    return sorted(kept)


def smoothed(points: list[Point]) -> list[Point]:
    """Averages each point with its neighbours, over a window of a thirtieth of the points."""
    reach = len(points) // 60
    averages = []
    for i, (step, _) in enumerate(points):
        near = min(reach, i, len(points) - 1 - i)  # a symmetric window, so the ends do not lag
        window = points[i - near : i + near + 1]
        averages.append((step, sum(value for _, value in window) / len(window)))
    return averages


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Chooses round numbers inside a range.

    Args:
        low: Its lower end.
        high: Its upper end, above `low`.
        count: About how many.

    Returns:
        Multiples of 1, 2 or 5 times a power of ten, ascending.
    """
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    width = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / width - 1e-9), math.floor(high / width + 1e-9)
    return [round(number * width, 12) for number in range(first, last + 1)]


class _Frame(NamedTuple):
    """The ranges of a chart; `logarithmic` means the vertical one."""

    steps: tuple[float, float]
    values: tuple[float, float]
    logarithmic: bool

    def x(self, step: float) -> float:
        low, high = self.steps
        return SIDE * (step - low) / (high - low)

    def y(self, value: float) -> float:
        low, high, value = (math.log(v) if self.logarithmic else v for v in (*self.values, value))
        return SIDE * (high - value) / (high - low)


def _frame(series: Sequence[Series], references: Sequence[Reference]) -> _Frame:
    steps = [step for line in series for step, _ in line.points]
    values = [value for line in series for _, value in line.points] + [line.value for line in references]
    low, high = min(values), max(values)
    logarithmic = low > 0 and high / low > LOGARITHMIC_FROM
    if logarithmic:
        values_range = low / 1.1, high * 1.1
    else:
        margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        values_range = low - margin, high + margin
    first, last = min(steps), max(steps)
    return _Frame((first, last if last > first else first + 1), values_range, logarithmic)


def _value_ticks(frame: _Frame) -> list[float]:
    low, high = frame.values
    if not frame.logarithmic:
        return ticks(low, high)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if len(powers) > 3 else (1, 2, 5)
    return [factor * 10.0**power for power in powers for factor in factors if low <= factor * 10.0**power <= high]


def _line(frame: _Frame, line: Series) -> str:
    if len(line.points) < SMOOTH_FROM:
        dots = "".join(f"M{frame.x(step):.1f} {frame.y(value):.1f}h0" for step, value in line.points)
        few = f'<path class="dots {line.kind}" d="{dots}"/>' if len(line.points) <= SMOOTH_FROM // 2 else ""
        return _polyline(frame, line.points, line.kind) + few
    return _polyline(frame, line.points, f"{line.kind} raw") + _polyline(frame, smoothed(line.points), line.kind)


def _polyline(frame: _Frame, points: list[Point], css: str) -> str:
    corners = " ".join(f"{frame.x(step):.1f},{frame.y(value):.1f}" for step, value in points)
    return f'<polyline class="{css}" points="{corners}"/>'


def _grid(frame: _Frame) -> str:
    lines = "".join(f"M0 {frame.y(value):.1f}H{SIDE}" for value in _value_ticks(frame))
    return f'<path class="grid" d="{lines}"/>'


def _dashes(frame: _Frame, references: Sequence[Reference]) -> str:
    return "".join(f'<path class="reference" d="M0 {frame.y(line.value):.1f}H{SIDE}"/>' for line in references)


def _labels(frame: _Frame, references: Sequence[Reference], write: Callable[[float], str]) -> str:
    tall = "".join(
        f'<span class="y" style="top:{frame.y(value) * 100 / SIDE:.2f}%">{_short(value)}</span>'
        for value in _value_ticks(frame)
    )
    wide = "".join(
        f'<span class="x" style="left:{frame.x(step) * 100 / SIDE:.2f}%">{_short(step)}</span>'
        for step in ticks(*frame.steps, count=6)
        if step == int(step)
    )
    names = "".join(
        f'<span class="name" style="top:{frame.y(line.value) * 100 / SIDE:.2f}%">{visible(line.name)} '
        f"{write(line.value)}</span>"
        for line in references
    )
    return tall + wide + names + '<span class="unit">step</span>'


def _widest(frame: _Frame) -> int:
    """Characters of the longest label beside the plot."""
    return max((len(_short(value)) for value in _value_ticks(frame)), default=0)


def _legend(series: Sequence[Series], write: Callable[[float], str]) -> str:
    last = [(line.kind, line.name or "last", write(line.points[-1][1])) for line in series]
    keys = [f'<span class="key {kind}">{visible(name)} {value}</span>' for kind, name, value in last]
    if len(series) > 1 and any(len(line.points) >= SMOOTH_FROM for line in series):
        keys.append('<span class="note">bold: moving average</span>')
    return " ".join(keys)


def _data(frame: _Frame, series: Sequence[Series], write: Callable[[float], str]) -> str:
    """What the tooltip shows: per line its name and its steps with places and texts."""
    lines = [
        {
            "name": line.name,
            "kind": line.kind,
            "points": [
                [step, round(frame.x(step) / SIDE, 4), round(frame.y(value) / SIDE, 4), write(value)]
                for step, value in line.points
            ],
        }
        for line in series
    ]
    return json.dumps(lines, separators=(",", ":")).replace("<", "\\u003c")


def _short(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e4:
        thousands = abs(value) >= 1e4
        return f"{value / 1000:g}k" if thousands and abs(value) < 1e6 else f"{value:g}".replace("e+0", "e")
    return f"{value:g}"
