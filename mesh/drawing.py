"""Drawing a mesh as text: a table of devices, shortened where it is large."""

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from .compat import backend_started
from .errors import UserError
from .shapes import sizes_text

if TYPE_CHECKING:
    from .device_mesh import DeviceMesh

MAX_COLUMNS = 8
MAX_ROWS = 16
GAP = "..."


def draw(mesh: "DeviceMesh") -> str:
    """Draws a mesh: the last axis across, the others down; axes of size 1 are left out.

    Args:
        mesh: Any mesh; no device is opened.

    Returns:
        A heading and a table of device names, of at most 8 columns and 16 rows; once JAX's devices are open, also which
        axes cross processes.
    """
    platforms = sorted({name.partition(":")[0] for name in mesh.devices.flat})
    heading = f"{sizes_text(mesh.shape, mesh.axis_names)}: {mesh.size} device(s), {', '.join(platforms)}"
    axes = [axis for axis, size in enumerate(mesh.shape) if size > 1] or [len(mesh.shape) - 1]
    grid = mesh.devices.reshape([mesh.shape[axis] for axis in axes])
    names = [mesh.axis_names[axis] for axis in axes]
    columns = _shortened(range(grid.shape[-1]), MAX_COLUMNS)
    rows = _shortened(list(product(*map(range, grid.shape[:-1]))), MAX_ROWS)
    table = [["", *(_label(names[-1:], [column]) for column in columns)]]
    for row in rows:
        cells = [GAP if None in (row, column) else str(grid[(*row, column)]) for column in columns]
        table.append([_label(names[:-1], row), *cells])
    return "\n".join([heading, *_aligned(table), *_crossing(mesh)])


def _crossing(mesh: "DeviceMesh") -> list[str]:
    if not backend_started():
        return []
    try:
        across = mesh.axes_across_processes
    except UserError:  # a mesh of devices that are elsewhere
        return []
    return [f"  crosses processes: {', '.join(across)}"] if across else []


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
