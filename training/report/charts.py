"""Line charts as HTML: SVG lines that stretch with the page, and text that does not."""

import json
import math
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import NamedTuple

from .page import visible
from .points import Point, smoothed, thinned

SMOOTH_FROM = 60
"""Points from which a moving average is drawn over the raw line."""
LOGARITHMIC_FROM = 40
"""Highest by lowest value from which the axis is logarithmic."""
SIDE = 1000
"""The drawing's own units, across and down."""
MOST_LOGARITHMIC = 7
"""Labels of a logarithmic axis, beyond which only powers of ten have one."""
STRIPE, DOT = 9, 7
"""Pixels: of a stripe of one of several lines that coincide; across a dot, as in report.css."""
RUN_COLORS = 8
"""Colors of runs that are compared."""
MAX_MARKS = 200
"""Marks of one kind drawn side by side."""
MARK_NAMES = {"start": "started again", "lost": "went back", "skipped": "update left out", "save": "save"}
"""Kind of a mark -> what the legend calls it."""


class Series(NamedTuple):
    """One line of a chart.

    Attributes:
        name: Its name in the legend and the tooltip; may be empty where it is alone.
        points: (step, value), steps ascending, all finite.
        kind: The color: "train", "eval", or of one run of several, see `run_kind`. Few points get dots.
    """

    name: str
    points: list[Point]
    kind: str = "train"


class Reference(NamedTuple):
    """A dashed line at one value.

    Attributes:
        name: What has this value.
        value: A finite number.
    """

    name: str
    value: float


class Mark(NamedTuple):
    """Something that happened at one step.

    Attributes:
        step: Its place.
        kind: "start", "save", "skipped" or "lost"; chooses the color.
        text: What the tooltip says.
    """

    step: float
    kind: str
    text: str


def run_kind(number: int) -> str:
    """Gives the color of a run among several; beyond the colors lines are dashed.

    Args:
        number: From 0.
    """
    return f"run{number % RUN_COLORS}" + (" dashed" if number // RUN_COLORS % 2 else "")


def chart(
    title: str,
    series: Sequence[Series],
    references: Sequence[Reference] = (),
    *,
    write: Callable[[float], str],
    height: int = 300,
    marks: Sequence[Mark] = (),
) -> str:
    """Draws lines over steps.

    Args:
        title: What the values are.
        series: Lines; those without points are left out.
        references: Dashed lines.
        write: Writes a value of the legend and of the tooltip.
        height: Pixels of the plot; the width is that of the page.
        marks: What happened meanwhile; those beyond the lines are left out, and of many in one place one is drawn.

    Returns:
        HTML; "" where there is no point at all.
    """
    series = [line._replace(points=thinned(line.points)) for line in series if line.points]
    if not series:
        return ""
    frame = _frame(series, references)
    marks = _told_apart(frame, marks)
    return (
        f'<figure class="chart"><figcaption><b>{visible(title)}</b> {_legend(frame, series, marks, write)}</figcaption>'
        f'<div class="plot" tabindex="0" style="height:{height}px;--label:{_widest(frame)}ch">'
        f"{_labels(frame, series, references, write)}"
        f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" role="img"><title>{visible(title)}</title>'
        f"<desc>{visible(_in_words(series, write))}</desc>{_grid(frame)}{_marks(frame, marks)}"
        f"{''.join(map(_line, repeat(frame), series, _stripes(frame, series)))}{_dashes(frame, references)}</svg>"
        f'<script type="application/json">{_data(frame, series, marks, write)}</script></div></figure>'
    )


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
    every = [factor * 10.0**power for power in powers for factor in (1, 2, 5) if low <= factor * 10.0**power <= high]
    return every if len(every) <= MOST_LOGARITHMIC else [10.0**power for power in powers if low <= 10.0**power <= high]


def _coinciding(frame: _Frame, series: Sequence[Series]) -> list[list[int]]:
    """Groups lines that a reader cannot tell apart, as numbers of the lines; a group has at least two."""
    groups: list[list[int]] = []
    for number, line in enumerate(series):
        group = next((group for group in groups if _coincide(frame, series[group[0]], line)), None)
        if group is None:
            groups.append([number])
        else:
            group.append(number)
    return [group for group in groups if len(group) > 1]


def _coincide(frame: _Frame, one: Series, other: Series) -> bool:
    """Compares the drawn heights of two lines at the steps that both have."""
    heights = {step: frame.y(value) for step, value in one.points}
    shared = [(heights[step], frame.y(value)) for step, value in other.points if step in heights]
    return bool(shared) and all(abs(height - own) < 1 for height, own in shared)


def _stripes(frame: _Frame, series: Sequence[Series]) -> list[tuple[int, int]]:
    """Returns the place of each line among those that coincide with it, and their number; (0, 1) of a line alone."""
    places = [(0, 1)] * len(series)
    for group in _coinciding(frame, series):
        for place, number in enumerate(group):
            places[number] = place, len(group)
    return places


def _line(frame: _Frame, line: Series, stripe: tuple[int, int]) -> str:
    """Draws a line; lines that coincide take turns in stripes, and their dots are rings around each other."""
    place, count = stripe
    dashes = dots_width = ""
    if count > 1:
        dashes = f' style="stroke-dasharray:{STRIPE} {STRIPE * (count - 1)};stroke-dashoffset:{-STRIPE * place}"'
        dots_width = f' style="stroke-width:{DOT + 4 * (count - 1 - place)}px"'
    if len(line.points) < SMOOTH_FROM:
        dots = "".join(f"M{frame.x(step):.1f} {frame.y(value):.1f}h0" for step, value in line.points)
        few = f'<path class="dots {line.kind}"{dots_width} d="{dots}"/>' if len(line.points) <= SMOOTH_FROM // 2 else ""
        return _polyline(frame, line.points, line.kind, dashes) + few
    raw = _polyline(frame, line.points, f"{line.kind} raw", dashes)
    return raw + _polyline(frame, smoothed(line.points), line.kind, dashes)


def _polyline(frame: _Frame, points: list[Point], css: str, style: str) -> str:
    corners = " ".join(f"{frame.x(step):.1f},{frame.y(value):.1f}" for step, value in points)
    return f'<polyline class="{css}"{style} points="{corners}"/>'


def _grid(frame: _Frame) -> str:
    lines = "".join(f"M0 {frame.y(value):.1f}H{SIDE}" for value in _value_ticks(frame))
    return f'<path class="grid" d="{lines}"/>'


def _dashes(frame: _Frame, references: Sequence[Reference]) -> str:
    return "".join(f'<path class="reference" d="M0 {frame.y(line.value):.1f}H{SIDE}"/>' for line in references)


def _told_apart(frame: _Frame, marks: Sequence[Mark]) -> list[Mark]:
    """The marks within the lines, one of each kind in each place that a screen shows."""
    low, high = frame.steps
    within = [mark for mark in marks if low <= mark.step <= high]
    return list({(mark.kind, round(frame.x(mark.step) / SIDE * MAX_MARKS)): mark for mark in within}.values())


def _marks(frame: _Frame, marks: Sequence[Mark]) -> str:
    """Saves as short lines at the bottom, updates left out at the top, what interrupts the run as whole ones."""
    reach = {"save": (SIDE, SIDE * 0.94), "skipped": (SIDE * 0.06, 0)}
    lines = []
    for mark in marks:
        start, end = reach.get(mark.kind, (SIDE, 0))
        lines.append(f'<path class="mark {mark.kind}" d="M{frame.x(mark.step):.1f} {start:g}V{end:g}"/>')
    return "".join(lines)


def _in_words(series: Sequence[Series], write: Callable[[float], str]) -> str:
    """What the lines show, for those who do not see them."""
    told = []
    for line in series:
        (first, start), (last, end) = line.points[0], line.points[-1]
        lowest, highest = (write(pick(value for _, value in line.points)) for pick in (min, max))
        name = f"{line.name}: " if line.name else ""
        told.append(
            f"{name}{write(start)} at step {_short(first)}, {write(end)} at step {_short(last)}, between {lowest} and "
            f"{highest}."
        )
    return " ".join(told)


def _labels(
    frame: _Frame, series: Sequence[Series], references: Sequence[Reference], write: Callable[[float], str]
) -> str:
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
        f'<span class="name{_side(line, series)}" style="top:{frame.y(line.value) * 100 / SIDE:.2f}%">'
        f"{visible(line.name)} {write(line.value)}</span>"
        for line in references
    )
    return tall + wide + names + '<span class="unit">step</span>'


def _side(reference: Reference, series: Sequence[Series]) -> str:
    """The name of a reference stands on the side of its line where the lines do not end."""
    above = sum(line.points[-1][1] > reference.value for line in series)
    return " under" if 2 * above >= len(series) else ""


def _widest(frame: _Frame) -> int:
    """Characters of the longest label beside the plot."""
    return max((len(_short(value)) for value in _value_ticks(frame)), default=0)


def _legend(frame: _Frame, series: Sequence[Series], marks: Sequence[Mark], write: Callable[[float], str]) -> str:
    last = [(line.kind, line.name or "last", write(line.points[-1][1])) for line in series]
    keys = [f'<span class="key {kind}">{visible(name)} {value}</span>' for kind, name, value in last]
    there = {mark.kind for mark in marks}
    keys += [f'<span class="key mark {kind}">{name}</span>' for kind, name in MARK_NAMES.items() if kind in there]
    if len(series) > 1 and any(len(line.points) >= SMOOTH_FROM for line in series):
        keys.append('<span class="note">bold: moving average</span>')
    for group in _coinciding(frame, series):
        names = ", ".join(series[number].name for number in group)
        keys.append(f'<span class="note same">in stripes, the same curve: {visible(names)}</span>')
    return " ".join(keys)


def _data(frame: _Frame, series: Sequence[Series], marks: Sequence[Mark], write: Callable[[float], str]) -> str:
    """What the tooltip shows: per line its name and its steps with places and texts; marks with places and texts."""
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
    placed = [[round(frame.x(mark.step) / SIDE, 4), mark.text] for mark in marks]
    data = {"lines": lines, "marks": placed}
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _short(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e4:
        thousands = abs(value) >= 1e4
        return f"{value / 1000:g}k" if thousands and abs(value) < 1e6 else f"{value:g}".replace("e+0", "e")
    return f"{value:g}"
