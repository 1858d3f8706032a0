"""Draws what each device of a mesh holds under a plan, as one SVG: light or dark as its reader's system is.

Everything drawn is read from the plan: the rows of a batch, the positions of a row, a parameter, its gradient with the
optimizer's state, and what a strategy keeps beside these.
"""

from collections.abc import Sequence
from html import escape
from math import prod
from typing import NamedTuple

import numpy as np
from spmdkit.layouts.sizes import format_bytes
from spmdkit.layouts.tensor_layout import TensorLayout
from spmdkit.parallel import Collective, ShardingPlan, Step
from spmdkit.parallel.context import AXIS as CONTEXT
from spmdkit.parallel.context import chunks_of
from spmdkit.parallel.tensor import AXIS as TENSOR
from spmdkit.report.drawings import part_hue, parts_of_devices

from .svg import frame, in_color

LEFT, TOP, COLUMNS = 20, 66, 4
CELL, GAP, BAR, NAME = 168, 8, 80, 78
"""Widths: of a device, between devices, of a bar, of the name before it."""
LINE = 21
STYLE = """.none { fill: none; stroke: var(--line); } .all { fill: var(--all); stroke: var(--card); }
.held { fill: oklch(72% 0.12 var(--h)); stroke: var(--card); }
"""


class Bar(NamedTuple):
    """One thing that devices hold: its name, into how many parts it is cut, and each device's parts."""

    name: str
    num_parts: int
    held: Sequence[tuple[int, ...]]


def draw(step: Step, path: str, sent: Sequence[Collective], title: str) -> str:
    """Draws the devices of a step's mesh.

    Args:
        step: A step; its mesh has at most two axes of more than one device.
        path: The parameter that is drawn.
        sent: The collectives of the step.
        title: What the drawing shows, for those who cannot see it.

    Returns:
        The text of the SVG.
    """
    plan, bars = step.plan, bars_of(step, path)
    count = plan.mesh.size
    tall = 30 + LINE * len(bars)
    bottom = TOP + -(-count // COLUMNS) * (tall + GAP)
    width, height = LEFT + COLUMNS * (CELL + GAP) + LEFT - GAP, bottom + 22 + 20 * len(sent)
    cells = (_cell(bars, number, tall) for number in range(count))
    parts = [*_head(plan, path), *(part for cell in cells for part in cell), *_traffic(sent, bottom + 18)]
    return frame(width, height, title, STYLE, parts)


def bars_of(step: Step, path: str) -> list[Bar]:
    """What each device of a step's mesh holds; arguments as for `draw`."""
    plan = step.plan
    stored, update = plan.table.row(path), plan.update_table.row(path)
    bars = [of_layout("rows", TensorLayout((plan.batch_axes,), plan.mesh))]
    bars += _positions(plan)
    bars += [of_layout("parameter", stored.layout), of_layout("optimizer", update.layout)]
    for row in step.extra_table.rows:
        if row.path == path or row.path.startswith("sent/"):
            bars.append(of_layout("own copy" if row.path == path else "errors", row.layout))
    return bars


def of_layout(name: str, layout: TensorLayout) -> Bar:
    """The parts of an array, numbered with its last dim fastest."""
    counts = [layout.parts_of_dim(dim) for dim in range(len(layout.axes))]
    parts = parts_of_devices(layout, len(counts)).reshape(-1, len(counts))
    return Bar(name, prod(counts), [(int(np.ravel_multi_index(tuple(part), counts)),) for part in parts])


def _positions(plan: ShardingPlan) -> list[Bar]:
    """The positions of a row between products, where devices share them."""
    if plan.mesh_size(CONTEXT) > 1:
        config = plan.configs[CONTEXT]
        ranks = parts_of_devices(TensorLayout((CONTEXT,), plan.mesh), 1).reshape(-1)
        return [Bar("positions", config.num_chunks, [chunks_of(int(rank), config) for rank in ranks])]
    return [of_layout("positions", TensorLayout((TENSOR,), plan.mesh))] if plan.mesh_size(TENSOR) > 1 else []


def _head(plan: ShardingPlan, path: str) -> list[str]:
    sizes = [(axis, size) for axis, size in zip(plan.mesh.axis_names, plan.mesh.shape, strict=True) if size > 1]
    axes = " x ".join(in_color(axis, f" {size}") for axis, size in sizes)
    return [
        f'<text class="head" x="{LEFT}" y="30">{plan.mesh.size} devices: {axes}</text>',
        f'<text class="dim" x="{LEFT}" y="50">Colored: what a device holds. The parameter is {escape(path)}; gray is '
        "a whole one.</text>",
    ]


def _cell(bars: Sequence[Bar], number: int, tall: int) -> list[str]:
    x, y = LEFT + number % COLUMNS * (CELL + GAP), TOP + number // COLUMNS * (tall + GAP)
    card = f'<rect class="card" x="{x}" y="{y}" width="{CELL}" height="{tall}" rx="8"/>'
    name = f'<text x="{x + 10}" y="{y + 19}">device {number}</text>'
    return [card, name, *(part for line, bar in enumerate(bars) for part in _bar(bar, number, x, y + 27 + LINE * line))]


def _bar(bar: Bar, number: int, x: float, y: float) -> list[str]:
    width = BAR / bar.num_parts
    parts = [f'<text class="dim" x="{x + 10}" y="{y + 12}">{bar.name}</text>']
    for part in range(bar.num_parts):
        hue = part_hue(part, bar.num_parts)
        held = 'class="none"' if hue is not None else 'class="all"'
        if hue is not None and part in bar.held[number]:
            held = f'class="held" style="--h: {hue:g}"'
        parts.append(f'<rect {held} x="{x + NAME + part * width:g}" y="{y}" width="{width:g}" height="15"/>')
    return parts


def _traffic(sent: Sequence[Collective], y: float) -> list[str]:
    lines = []
    for line, collective in enumerate(sent):
        axes = " x ".join(map(in_color, collective.axes))
        times = f"{collective.count} a step, {format_bytes(collective.bytes)}"
        lines.append(f'<text x="{LEFT}" y="{y + 20 * line}">{collective.kind} over {axes}: {times}</text>')
    return lines
