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
    return None if num_parts == 1 else round(250 + 360 * part / (num_parts + 1), 1) % 360


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
    axes = [axis for axis, size in sizes.items() if size > 1] or [mesh.axis_names[-1]]
    *outer, down, across = axes if len(axes) > 1 else ["", *axes]
    columns, rows = shorten(range(sizes[across]), max_columns), shorten(range(sizes.get(down, 1)), MAX_ROWS)

    def draw_cell(place: Mapping[str, int | None]) -> Cell | None:
        return None if None in place.values() else cell(tuple(place.get(axis) or 0 for axis in mesh.axis_names))

    def draw_grid(numbers: tuple[int, ...]) -> dict[str, Any]:
        places = list(zip(outer, numbers, strict=True))
        cells = [[draw_cell({**dict(places), down: row, across: column}) for column in columns] for row in rows]
        return {"places": places, "rows": list(zip(rows, cells, strict=True))}

    grids = shorten(list(product(*(range(sizes[axis]) for axis in outer))), max_grids)
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
        "wide": max(mesh.shape) > 8 or sum(size > 1 for size in mesh.shape) > 2,
        "mesh": draw_mesh(mesh, cell, 16, 8),
    }


def mesh_sizes(mesh: DeviceMesh) -> str:
    """Returns the axes and sizes of a mesh, such as "data 2 × fsdp 4"; "" for one device."""
    return " × ".join(f"{name} {size}" for name, size in zip(mesh.axis_names, mesh.shape, strict=True) if size > 1)


def draw_array(row: LayoutRow) -> dict[str, Any]:
    """Draws an array cut into its parts, beside the mesh with the part of each device, for the macro `array`.

    Args:
        row: A row of a layout table.
    """
    layout, mesh, shape = row.layout, row.layout.mesh, row.shape
    splits = [layout.parts_of_dim(dim) for dim in range(len(shape))]
    num_parts = prod(splits)
    parts = parts_of_devices(layout, len(shape))

    def cell(place: tuple[int, ...]) -> Cell:
        part = int(np.ravel_multi_index(parts[place], splits)) if splits else 0
        device, name = str(mesh.devices[place]), part_name(part, num_parts) if num_parts > 1 else ""
        return Cell(
            _number(device),
            name,
            f"{device} holds part {name}" if name else f"{device} holds all of it",
            part_hue(part, num_parts),
        )

    down, across = _drawn_dims(shape, splits)
    height, width = _sides(row, down, across)
    pieces = []
    for (i, top, tall), (j, left, wide) in product(_cuts(splits, down, height), _cuts(splits, across, width)):
        box = {"x": round(left, 1), "y": round(top, 1), "width": round(wide, 1), "height": round(tall, 1)}
        box |= {"gap": False, "text_x": round(left + wide / 2, 1), "text_y": round(top + tall / 2, 1)}
        if i is None or j is None:
            pieces.append({**box, "gap": True, "hue": None, "name": GAP})
            continue
        indices = [i if dim == down else j if dim == across else 0 for dim in range(len(splits))]
        part = int(np.ravel_multi_index(indices, splits)) if indices else 0
        named = num_parts > 1 and wide >= 12 and tall >= 12
        pieces.append({**box, "hue": part_hue(part, num_parts), "name": part_name(part, num_parts) if named else ""})
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


def _describe(row: LayoutRow, num_parts: int) -> str:
    whole = f"{_shape_text(row.shape)} {row.dtype}"
    if num_parts == 1:
        return f"{whole}, whole on every device: {format_bytes(row.bytes_per_device)}"
    copies = row.layout.mesh.size // num_parts
    held = f"each {_shape_text(row.layout.shard_shape(row.shape))}, {format_bytes(row.bytes_per_device)}"
    return f"{whole} in {num_parts} parts, {held}, " + (f"{copies} copies" if copies > 1 else "no copies")


def _drawn_dims(shape: Sequence[int], splits: Sequence[int]) -> tuple[int | None, int | None]:
    """Returns the dims drawn down and across: split dims first, then the largest."""
    ranked = sorted(range(len(shape)), key=lambda dim: (splits[dim] == 1, -shape[dim]))[:2]
    if len(ranked) < 2:
        return None, ranked[0] if ranked else None
    return min(ranked), max(ranked)


def _sides(row: LayoutRow, down: int | None, across: int | None) -> tuple[int, int]:
    """Returns height and width in pixels: true to the shape, but with no part too small to see."""
    least = [20 * min(row.layout.parts_of_dim(dim), MAX_PARTS) if dim is not None else 28 for dim in (down, across)]
    if down is None or across is None:
        return least[0], (28 if across is None else max(150, least[1]))
    ratio = min(4.0, max(0.25, row.shape[across] / row.shape[down]))
    height, width = (round(150 / ratio), 150) if ratio >= 1 else (150, round(150 * ratio))
    return max(height, least[0]), max(width, least[1])


def _cuts(splits: Sequence[int], dim: int | None, length: float) -> list[tuple[int | None, float, float]]:
    """Returns the drawn parts along a dim: (number or None for a gap, start, length in pixels)."""
    numbers = shorten(range(splits[dim]), MAX_PARTS) if dim is not None else [0]
    each = length / len(numbers)
    return [(number, place * each, each) for place, number in enumerate(numbers)]


def _dim_text(row: LayoutRow, dim: int) -> str:
    parts = row.layout.parts_of_dim(dim)
    if parts == 1:
        return f"{row.shape[dim]}"
    return f"{row.shape[dim]} = {parts} × {row.shape[dim] // parts} over {', '.join(row.layout.axes_of_dim(dim))}"


def _number(device: str) -> str:
    return device.rpartition(":")[2]


def _shape_text(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "scalar"
