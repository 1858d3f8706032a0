"""Drawings of a mesh, and of the part of an array that each device holds, as values for the macros of parts.html."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..layouts.sizes import format_bytes
from ..layouts.table import LayoutRow
from ..layouts.tensor_layout import TensorLayout
from ..mesh.axes import AXES
from ..mesh.device_mesh import DeviceMesh, shorten

GAP = "…"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_PARTS = 8
"""Parts drawn along one dim of an array."""
MAX_ROWS = 8
"""Rows drawn of a mesh."""
AXIS_HUES = dict(zip(AXES, (300, 25, 250, 350, 150, 75), strict=True))
"""A color for each canonical axis; other axes share that of `data`."""


class Cell(NamedTuple):
    """One device of a drawn mesh: number, part of an array, tooltip, and hue in degrees (None: gray)."""

    number: str
    part: str
    title: str
    hue: float | None


def axis_hue(axis: str) -> int:
    """Returns the color of a mesh axis, in degrees."""
    return AXIS_HUES.get(axis, AXIS_HUES["data"])


def part_hue(part: int, num_parts: int) -> float | None:
    """Returns the color of a part of an array, in degrees; None if the array has one part."""
    if num_parts == 1:
        return None
    return round(250 + 360 * part / (num_parts + 1), 1) % 360


def part_name(part: int, num_parts: int) -> str:
    """Returns a letter, or a number if there are many parts."""
    return LETTERS[part] if num_parts <= len(LETTERS) else str(part)


def parts_of_devices(layout: TensorLayout, num_dims: int) -> np.ndarray:
    """Finds the part of an array that each device holds.

    Args:
        layout: A layout on a mesh.
        num_dims: The number of dims of the array.

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


def draw_mesh(
    mesh: DeviceMesh, cell: Callable[[tuple[int, ...]], Cell], max_columns: int, max_grids: int
) -> dict[str, Any]:
    """Draws a mesh: the last axis across, the one before it down, the others as grids side by side.

    Args:
        mesh: Any mesh; axes of size 1 are left out.
        cell: Returns the drawing of the device at a place, one index per axis.
        max_columns: The columns drawn of a grid; the others are replaced by an ellipsis.
        max_grids: The maximum number of grids, likewise.

    Returns:
        The axis across, its columns, and the grids: `places` (axis and number) and `rows` (place and cells). None in
        place of a column, row, cell or grid is an ellipsis.
    """
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    axes = list(mesh.split_axes) or [mesh.axis_names[-1]]
    if len(axes) == 1:
        axes = ["", *axes]
    *outer, down, across = axes
    columns = shorten(range(sizes[across]), max_columns)
    rows = shorten(range(sizes.get(down, 1)), MAX_ROWS)

    def draw_cell(place: Mapping[str, int | None]) -> Cell | None:
        if None in place.values():
            return None
        return cell(tuple(place.get(axis) or 0 for axis in mesh.axis_names))

    def draw_grid(numbers: tuple[int, ...]) -> dict[str, Any]:
        places = list(zip(outer, numbers, strict=True))
        drawn_rows = []
        for row in rows:
            place = {**dict(places), down: row}
            cells = [draw_cell({**place, across: column}) for column in columns]
            drawn_rows.append((row, cells))
        return {"places": places, "rows": drawn_rows}

    outer_sizes = [range(sizes[axis]) for axis in outer]
    grids = shorten(list(product(*outer_sizes)), max_grids)
    return {
        "across": across,
        "down": down,
        "columns": columns,
        "grids": [None if place is None else draw_grid(place) for place in grids],
    }


def draw_devices(mesh: DeviceMesh) -> dict[str, Any]:
    """Draws a mesh with the number of each device, for the macro `devices` of parts.html."""

    def cell(place: tuple[int, ...]) -> Cell:
        name = str(mesh.devices[place])
        return Cell(_number(name), "", name, None)

    return {
        "text": f"{mesh_sizes(mesh)}: {mesh.size:,} devices, {mesh.devices.flat[0]} to {mesh.devices.flat[-1]}",
        "wide": max(mesh.shape) > 8 or len(mesh.split_axes) > 2,
        "mesh": draw_mesh(mesh, cell, 16, 8),
    }


def mesh_sizes(mesh: DeviceMesh) -> str:
    """Returns the axes and sizes of a mesh, such as "data 2 × fsdp 4"; "" for one device."""
    return " × ".join(f"{name} {size}" for name, size in mesh.split_axes.items())


def draw_array(row: LayoutRow) -> dict[str, Any]:
    """Draws an array cut into its parts, beside the mesh with the part of each device, for the macro `array`.

    Args:
        row: A row of a layout table.
    """
    layout = row.layout
    mesh = layout.mesh
    shape = row.shape
    splits = [layout.parts_of_dim(dim) for dim in range(len(shape))]
    num_parts = prod(splits)
    parts = parts_of_devices(layout, len(shape))

    def cell(place: tuple[int, ...]) -> Cell:
        device = str(mesh.devices[place])
        if num_parts == 1:
            return Cell(_number(device), "", f"{device} holds all of it", None)
        part = int(np.ravel_multi_index(parts[place], splits))
        name = part_name(part, num_parts)
        return Cell(_number(device), name, f"{device} holds part {name}", part_hue(part, num_parts))

    down, across = _drawn_dims(shape, splits)
    height, width = _sides(row, down, across)
    pieces = []
    for row_cut in _cuts(splits, down, height):
        for column_cut in _cuts(splits, across, width):
            part = _part_of_cuts(splits, {down: row_cut.number, across: column_cut.number})
            pieces.append(_draw_piece(row_cut, column_cut, part, num_parts))
    return {
        "path": row.path,
        "text": _describe(row, num_parts),
        "num_parts": num_parts,
        "width": width,
        "height": height,
        "pieces": pieces,
        "dims": [_dim_text(row, dim) for dim in range(len(shape))],
        "mesh": draw_mesh(mesh, cell, 8, 4),
    }


class _Cut(NamedTuple):
    """A drawn part along a dim: its number (None for a gap), and its start and length in pixels."""

    number: int | None
    start: float
    length: float


def _part_of_cuts(splits: Sequence[int], numbers: Mapping[int | None, int | None]) -> int | None:
    """Returns the number of the part of an array, by dim -> the part along it; None in a gap.

    Args:
        splits: The number of parts along each dim.
        numbers: The drawn dims, and None for a side of the drawing that is not a dim. Others are at their first part.
    """
    if None in numbers.values():
        return None
    if not splits:
        return 0
    indices = [numbers.get(dim) or 0 for dim in range(len(splits))]
    return int(np.ravel_multi_index(indices, splits))


def _draw_piece(row_cut: _Cut, column_cut: _Cut, part: int | None, num_parts: int) -> dict[str, Any]:
    """Draws one part of an array as a box, or the gap in place of omitted parts."""
    is_large = column_cut.length >= 12 and row_cut.length >= 12
    name = ""
    if part is None:
        name = GAP
    elif num_parts > 1 and is_large:
        name = part_name(part, num_parts)
    return {
        "x": round(column_cut.start, 1),
        "y": round(row_cut.start, 1),
        "width": round(column_cut.length, 1),
        "height": round(row_cut.length, 1),
        "gap": part is None,
        "text_x": round(column_cut.start + column_cut.length / 2, 1),
        "text_y": round(row_cut.start + row_cut.length / 2, 1),
        "hue": None if part is None else part_hue(part, num_parts),
        "name": name,
    }


def _describe(row: LayoutRow, num_parts: int) -> str:
    array = f"{_shape_text(row.shape)} {row.dtype}"
    if num_parts == 1:
        return f"{array}, whole on every device: {format_bytes(row.bytes_per_device)}"
    num_copies = row.layout.mesh.size // num_parts
    copies = f"{num_copies} copies" if num_copies > 1 else "no copies"
    shard = f"each {_shape_text(row.layout.shard_shape(row.shape))}, {format_bytes(row.bytes_per_device)}"
    return f"{array} in {num_parts} parts, {shard}, {copies}"


def _drawn_dims(shape: Sequence[int], splits: Sequence[int]) -> tuple[int | None, int | None]:
    """Returns the dims drawn down and across: split dims first, then the largest."""
    ranked = sorted(range(len(shape)), key=lambda dim: (splits[dim] == 1, -shape[dim]))
    if not ranked:
        return None, None
    if len(ranked) == 1:
        return None, ranked[0]
    first, second = ranked[:2]
    return min(first, second), max(first, second)


def _sides(row: LayoutRow, down: int | None, across: int | None) -> tuple[int, int]:
    """Returns height and width in pixels: true to the shape, but with no part too small to see."""

    def least(dim: int | None) -> int:
        return 28 if dim is None else 20 * min(row.layout.parts_of_dim(dim), MAX_PARTS)

    if across is None:
        return least(down), 28
    if down is None:
        return least(down), max(150, least(across))
    ratio = min(4.0, max(0.25, row.shape[across] / row.shape[down]))
    height = round(150 / ratio) if ratio >= 1 else 150
    width = 150 if ratio >= 1 else round(150 * ratio)
    return max(height, least(down)), max(width, least(across))


def _cuts(splits: Sequence[int], dim: int | None, length: float) -> list[_Cut]:
    """Returns the drawn parts along a dim; one part for None."""
    numbers = [0] if dim is None else shorten(range(splits[dim]), MAX_PARTS)
    part_length = length / len(numbers)
    return [_Cut(number, place * part_length, part_length) for place, number in enumerate(numbers)]


def _dim_text(row: LayoutRow, dim: int) -> str:
    parts = row.layout.parts_of_dim(dim)
    if parts == 1:
        return f"{row.shape[dim]}"
    return f"{row.shape[dim]} = {parts} × {row.shape[dim] // parts} over {', '.join(row.layout.axes_of_dim(dim))}"


def _number(device: str) -> str:
    return device.rpartition(":")[2]


def _shape_text(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "scalar"
