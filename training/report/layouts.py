"""The layout table of the report: where each parameter lives, one row for the layers of a list of blocks."""

from collections.abc import Sequence
from math import prod

from ...layouts.paths import joined_path
from ...layouts.sizes import counted, format_bytes
from ...layouts.table import LayoutRow, LayoutTable, largest, stack_bytes, stacks_of
from .drawings import axis_label
from .page import visible

MAX_ROWS = 300
"""Rows of the table; the smallest beyond are only counted."""
LONG = 40
"""Rows from which the table scrolls inside its own box."""
HEADS = (("parameter", ""), ("shape and axes", ""), ("dtype", ""), ("rule", ""), ("per device", ' class="number"'))


def layouts_section(table: LayoutTable) -> str:
    """Shows the layouts of all parameters.

    Args:
        table: Their layouts.

    Returns:
        HTML.
    """
    stacks = stacks_of(table.rows)
    shown = largest(stacks, MAX_ROWS)
    most = max(map(stack_bytes, stacks), default=1) or 1
    lines = "".join(_line(stack, most) for stack in shown)
    left_out = len(stacks) - len(shown)
    note = f" ({counted(left_out, 'smaller row')} not shown)" if left_out else ""
    heads = "".join(f"<th{css}><button>{name}</button></th>" for name, css in HEADS)
    return (
        '<h2>Layout of every parameter <small class="sortable">click a heading to sort</small></h2>'
        f'<div class="card scroll{" long" if len(shown) > LONG else ""}"><table class="layouts">'
        f"<thead><tr>{heads}</tr></thead><tbody>{lines}</tbody>"
        f'<tfoot><tr><td colspan="4">{counted(len(table.rows), "array")}, {counted(table.num_elements, "element")}, '
        f'{format_bytes(table.bytes_global)}{note}</td><td class="number">{format_bytes(table.bytes_per_device)}</td>'
        "</tr></tfoot></table></div>"
    )


def _line(stack: Sequence[LayoutRow], most: int) -> str:
    row, size = stack[0], stack_bytes(stack)
    parts = prod(row.layout.parts_of_dim(dim) for dim in range(len(row.shape)))
    share = f"1/{parts} of {format_bytes(sum(row.bytes_global for row in stack))}" if parts > 1 else "all of it"
    return (
        f'<tr><td class="path">{visible(joined_path([row.path for row in stack]))}</td>'
        f'<td class="shape" data-sort="{sum(prod(row.shape) for row in stack)}">{_shape(row)}</td>'
        f'<td class="dtype">{visible(str(row.dtype))}</td><td class="rule">{visible(row.rule)}</td>'
        f'<td class="number" data-sort="{size}">{format_bytes(size)}<small>{share}</small>'
        f'<i class="bar" style="width:{100 * size / most:.1f}%"></i></td></tr>'
    )


def _shape(row: LayoutRow) -> str:
    """The shape, each split dim followed by its axes and their sizes."""

    def axis(name: str) -> str:
        return axis_label(name, f" ÷{row.layout.mesh.axis_size(name)}")

    dims = (" ".join([str(size), *map(axis, row.layout.axes_of_dim(dim))]) for dim, size in enumerate(row.shape))
    return " × ".join(dims) or "scalar"
