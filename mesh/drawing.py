"""Drawing a mesh as text: a table of devices, shortened where it is large."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from .shapes import sizes_text
from .text import counted

MAX_COLUMNS = 8
MAX_ROWS = 16
GAP = "..."


def draw(devices: np.ndarray, axis_names: Sequence[str], across: Sequence[str] = ()) -> str:
    """Draws a mesh: the last axis across, the others down; axes of size 1 are left out.

    Args:
        devices: Names of devices, shaped like the mesh.
        axis_names: One name per axis.
        across: The axes that cross processes, where that is known.

    Returns:
        A heading and a table of device names, of at most 8 columns and 16 rows, and a line with the axes that cross
        processes.
    """
    platforms = sorted({name.partition(":")[0] for name in devices.flat})
    heading = f"{sizes_text(devices.shape, axis_names)}: {counted(devices.size, 'device')}, {', '.join(platforms)}"
    axes = [axis for axis, size in enumerate(devices.shape) if size > 1] or [devices.ndim - 1]
    grid: Any = devices.reshape([devices.shape[axis] for axis in axes])
    names = [axis_names[axis] for axis in axes]
    columns = _shortened(range(grid.shape[-1]), MAX_COLUMNS)
    rows = _shortened(list(product(*map(range, grid.shape[:-1]))), MAX_ROWS)
    table = [["", *(_label(names[-1:], [column]) for column in columns)]]
    for row in rows:
        cells = [GAP if None in (row, column) else str(grid[(*row, column)]) for column in columns]
        table.append([_label(names[:-1], row), *cells])
    crossing = [f"  crosses processes: {', '.join(across)}"] if across else []
    return "\n".join([heading, *_aligned(table), *crossing])


def _shortened(places: Sequence, limit: int) -> list:
    """Keeps the first places and the last one, with None for those left out."""
    return list(places) if len(places) <= limit else [*places[: limit - 2], None, places[-1]]


def _label(names: Sequence[str], numbers: Sequence[int | None] | None) -> str:
    if numbers is None or None in numbers:
        return GAP
    return " ".join(f"{name} {number}" for name, number in zip(names, numbers, strict=True))


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    indent = 2 if widths[0] else 0
    return [
        (" " * indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width)).rstrip()
        for row in table
    ]
