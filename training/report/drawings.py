"""Drawings of a mesh, and of which device holds which part of an array, as HTML and SVG."""

from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from ...layouts.sizes import counted, format_bytes
from ...layouts.table import LayoutRow
from ...layouts.tensor_layout import TensorLayout
from ...mesh.axes import AXES
from ...mesh.device_mesh import DeviceMesh
from .page import visible

GAP = "…"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_PARTS = 8
"""Parts drawn along one dim of an array."""
AXIS_HUES = dict(zip(AXES, (300, 25, 250, 350, 150, 75), strict=True))
"""A color for each canonical axis; others share that of `data`."""


class Cell(NamedTuple):
    """One device of a drawn mesh: what is written in it, what hovering says, and its color (degrees; None = plain)."""

    text: str
    title: str
    hue: float | None


class Limits(NamedTuple):
    """How much of a large mesh is drawn: columns, rows, and grids of them side by side."""

    columns: int
    rows: int
    grids: int


LARGE = Limits(16, 8, 8)
SMALL = Limits(8, 8, 4)


def axis_hue(axis: str) -> int:
    """Gives the color of a mesh axis, in degrees."""
    return AXIS_HUES.get(axis, AXIS_HUES["data"])


def axis_label(axis: str, remark: str = "") -> str:
    """Writes the name of a mesh axis in its color.

    Args:
        axis: Its name.
        remark: Text that follows in the same color.

    Returns:
        HTML.
    """
    return f'<span class="axis" style="--h:{axis_hue(axis)}">{visible(axis + remark)}</span>'


def part_hue(part: int, num_parts: int) -> float | None:
    """Gives the color of a part of an array, in degrees; None where the array is one part."""
    return None if num_parts == 1 else round(250 + 360 * part / (num_parts + 1), 1) % 360


def part_name(part: int, num_parts: int) -> str:
    """Names a part: letters for few, numbers for many."""
    return LETTERS[part] if num_parts <= len(LETTERS) else str(part)


def parts_of_devices(layout: TensorLayout, num_dims: int) -> np.ndarray:
    """Tells which part of an array each device holds.

    Args:
        layout: A layout on a mesh.
        num_dims: Dims of the array.

    Returns:
        int array of shape (*mesh.shape, num_dims): for each device, the index of its part along each dim.
    """
    mesh = layout.mesh
    places = dict(zip(mesh.axis_names, np.indices(mesh.shape), strict=True))
    parts = np.zeros((*mesh.shape, num_dims), int)
    for dim in range(num_dims):
        for axis in layout.axes_of_dim(dim):  # slowest first, like digits
            parts[..., dim] = parts[..., dim] * mesh.axis_size(axis) + places[axis]
    return parts


def draw_mesh(mesh: DeviceMesh, cell: Callable[[tuple[int, ...]], Cell], limits: Limits = LARGE) -> str:
    """Draws a mesh: the last axis across, the one before it down, the others as grids side by side.

    Args:
        mesh: Any mesh; axes of size 1 are left out.
        cell: Gives what to draw for the device at a place, one index per axis.
        limits: What is beyond is left out, with an ellipsis.

    Returns:
        HTML.
    """
    axes = [axis for axis, size in enumerate(mesh.shape) if size > 1] or [len(mesh.shape) - 1]
    columns = _shortened(range(mesh.shape[axes[-1]]), limits.columns)
    rows = _shortened(range(mesh.shape[axes[-2]]), limits.rows) if len(axes) > 1 else [0]
    outer = _shortened(list(product(*(range(mesh.shape[axis]) for axis in axes[:-2]))), limits.grids)

    def grid(place: tuple[int, ...] | None) -> str:
        if place is None:
            return f'<div class="gap">{GAP}</div>'
        fixed = dict(zip(axes[:-2], place, strict=True))
        label = " ".join(_place_label(mesh, axis, number) for axis, number in fixed.items())
        lines = [_header(mesh, axes, columns)]
        for row in rows:
            where = fixed | ({axes[-2]: row} if len(axes) > 1 else {})
            cells = (_cell(cell, mesh, where | {axes[-1]: column}) for column in columns)
            lines.append(f"<tr>{_row_label(mesh, axes, row)}{''.join(cells)}</tr>")
        caption = f"<caption>{label}</caption>" if label else ""
        return f'<table class="devices">{caption}{"".join(lines)}</table>'

    return f'<div class="mesh">{"".join(map(grid, outer))}</div>'


def draw_devices(mesh: DeviceMesh) -> str:
    """Draws a mesh with the number of each device.

    Args:
        mesh: Any mesh.

    Returns:
        HTML.
    """

    def cell(place: tuple[int, ...]) -> Cell:
        name = str(mesh.devices[place])
        return Cell(visible(_number(name)), visible(name), None)

    sizes = " × ".join(f"{name} {size}" for name, size in zip(mesh.axis_names, mesh.shape, strict=True) if size > 1)
    first, last = str(mesh.devices.flat[0]), str(mesh.devices.flat[-1])
    wide = " wide" if max(mesh.shape) > 8 or sum(size > 1 for size in mesh.shape) > 2 else ""
    return (
        f'<div class="card array{wide}"><div class="path">device mesh</div>'
        f"<p>{visible(sizes)}: {mesh.size:,} devices, {visible(first)} to {visible(last)}</p>"
        f"{draw_mesh(mesh, cell)}</div>"
    )


def draw_array(row: LayoutRow) -> str:
    """Draws one array cut into its parts, beside the mesh with the part that each device holds.

    Args:
        row: A row of a layout table.

    Returns:
        HTML.
    """
    layout, mesh, shape = row.layout, row.layout.mesh, row.shape
    splits = [layout.parts_of_dim(dim) for dim in range(len(shape))]
    num_parts = prod(splits)
    parts = parts_of_devices(layout, len(shape))

    def cell(place: tuple[int, ...]) -> Cell:
        part = int(np.ravel_multi_index(parts[place], splits)) if splits else 0
        device = str(mesh.devices[place])
        held = f"part {part_name(part, num_parts)}" if num_parts > 1 else "all of it"
        text = f"<small>{visible(_number(device))}</small>" + (part_name(part, num_parts) if num_parts > 1 else "")
        return Cell(text, visible(f"{device} holds {held}"), part_hue(part, num_parts))

    return (
        f'<div class="card array"><div class="path">{visible(row.path)}</div><p>{_sentence(row, num_parts)}</p>'
        f'<div class="pair">{_array_svg(row, splits)}{draw_mesh(mesh, cell, SMALL)}</div></div>'
    )


def _sentence(row: LayoutRow, num_parts: int) -> str:
    whole = f"{_times(row.shape)} {row.dtype}"
    if num_parts == 1:
        return f"{whole}, on every device whole: {format_bytes(row.bytes_per_device)}"
    copies = row.layout.mesh.size // num_parts
    held = f"each {_times(row.layout.shard_shape(row.shape))}, {format_bytes(row.bytes_per_device)}"
    return f"{whole} in {num_parts} parts, {held}, " + (f"{copies} copies" if copies > 1 else "no copies")


def _array_svg(row: LayoutRow, splits: Sequence[int]) -> str:
    """The array as a rectangle: at most two dims of it, those that are split first, cut and colored by part."""
    down, across = _drawn_dims(row.shape, splits)
    height, width = _sides(row, down, across)
    num_parts = prod(splits)
    pieces = []
    for (i, top, tall), (j, left, wide) in product(_cuts(splits, down, height), _cuts(splits, across, width)):
        if i is None or j is None:
            pieces.append(f'<text x="{left + wide / 2:.1f}" y="{top + tall / 2:.1f}">{GAP}</text>')
            continue
        indices = [i if dim == down else j if dim == across else 0 for dim in range(len(splits))]
        part = int(np.ravel_multi_index(indices, splits)) if indices else 0
        hue = part_hue(part, num_parts)
        style = 'class="whole"' if hue is None else f'class="part" style="--h:{hue:g}"'
        pieces.append(f'<rect {style} x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{tall:.1f}"/>')
        if num_parts > 1 and wide >= 12 and tall >= 12:
            name = part_name(part, num_parts)
            pieces.append(f'<text x="{left + wide / 2:.1f}" y="{top + tall / 2:.1f}">{name}</text>')
    notes = "".join(f"<li>{visible(_dim_text(row, dim))}</li>" for dim in range(len(row.shape)))
    label = f"{visible(row.path)} in {counted(num_parts, 'part')}"
    return (
        f'<div class="tensor"><svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{label}">{"".join(pieces)}</svg><ol>{notes}</ol></div>'
    )


def _drawn_dims(shape: Sequence[int], splits: Sequence[int]) -> tuple[int | None, int | None]:
    """The dims drawn down and across: split ones first, then the largest."""
    ranked = sorted(range(len(shape)), key=lambda dim: (splits[dim] == 1, -shape[dim]))[:2]
    if len(ranked) < 2:
        return None, ranked[0] if ranked else None
    return min(ranked), max(ranked)


def _sides(row: LayoutRow, down: int | None, across: int | None) -> tuple[int, int]:
    """Height and width in pixels: true to the shape, but no part too small to see."""
    least = [20 * min(row.layout.parts_of_dim(dim), MAX_PARTS) if dim is not None else 28 for dim in (down, across)]
    if down is None or across is None:
        return least[0], (28 if across is None else max(150, least[1]))
    ratio = min(4.0, max(0.25, row.shape[across] / row.shape[down]))
    height, width = (round(150 / ratio), 150) if ratio >= 1 else (150, round(150 * ratio))
    return max(height, least[0]), max(width, least[1])


def _cuts(splits: Sequence[int], dim: int | None, length: float) -> list[tuple[int | None, float, float]]:
    """The parts along a dim that are drawn: (number or None for a gap, start, length in pixels)."""
    numbers = _shortened(range(splits[dim]), MAX_PARTS) if dim is not None else [0]
    each = length / len(numbers)
    return [(number, place * each, each) for place, number in enumerate(numbers)]


def _dim_text(row: LayoutRow, dim: int) -> str:
    parts = row.layout.parts_of_dim(dim)
    if parts == 1:
        return f"{row.shape[dim]}"
    return f"{row.shape[dim]} = {parts} × {row.shape[dim] // parts} over {', '.join(row.layout.axes_of_dim(dim))}"


def _header(mesh: DeviceMesh, axes: Sequence[int], columns: Sequence[int | None]) -> str:
    name = visible(mesh.axis_names[axes[-1]])
    corner = "<td></td>" if len(axes) > 1 else ""
    heads = "".join(f"<th>{GAP if column is None else column}</th>" for column in columns)
    style = f'style="--h:{axis_hue(mesh.axis_names[axes[-1]])}"'
    return f'<tr>{corner}<th class="axis" {style} colspan="{len(columns)}">{name}</th></tr><tr>{corner}{heads}</tr>'


def _row_label(mesh: DeviceMesh, axes: Sequence[int], row: int | None) -> str:
    if len(axes) == 1:
        return ""
    return f"<th>{GAP}</th>" if row is None else f"<th>{_place_label(mesh, axes[-2], row)}</th>"


def _place_label(mesh: DeviceMesh, axis: int, number: int) -> str:
    return f"{axis_label(mesh.axis_names[axis])} {number}"


def _cell(cell: Callable[[tuple[int, ...]], Cell], mesh: DeviceMesh, where: dict[int, int | None]) -> str:
    if None in where.values():
        return f"<td>{GAP}</td>"
    drawn = cell(tuple(where.get(axis) or 0 for axis in range(len(mesh.shape))))
    style = 'class="device"' if drawn.hue is None else f'class="device part" style="--h:{drawn.hue:g}"'
    return f'<td {style} title="{drawn.title}">{drawn.text}</td>'


def _shortened(places: Sequence, limit: int) -> list:
    """Keeps the first places and the last one, with None for those left out."""
    return list(places) if len(places) <= limit else [*places[: limit - 2], None, places[-1]]


def _number(device: str) -> str:
    return device.rpartition(":")[2]


def _times(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "scalar"
