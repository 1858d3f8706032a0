"""The layout table: path, shape, rule, layout and bytes per device of every array of a tree."""

import html
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax
from jax.sharding import NamedSharding

from ..mesh.compat import PyTreeDef
from ..mesh.device_mesh import DeviceMesh
from ..mesh.errors import UserError, printable, unknown_name
from .paths import joined_path, numberless
from .sizes import array_bytes, counted, format_bytes
from .tensor_layout import TensorLayout

HEADINGS = ("path", "shape", "dtype", "rule", "layout", "per device")
MAX_ROWS = 40
"""Lines of the printed table."""
MAX_WIDTH = 48
"""Characters of a printed cell."""


@dataclass(frozen=True, kw_only=True)
class LayoutRow:
    """One array."""

    path: str
    """Names joined by "/"."""
    shape: tuple[int, ...]
    """The global shape."""
    dtype: Any
    """The array's dtype."""
    rule: str
    """The origin of the layout: the key of the rule, or the reason of the default or policy."""
    layout: TensorLayout
    """Its layout, on the table's mesh."""
    bytes_per_device: int
    """Bytes each device holds."""

    @property
    def elements_per_device(self) -> int:
        """Elements each device holds."""
        return prod(self.layout.shard_shape(self.shape))

    @property
    def bytes_global(self) -> int:
        """Bytes of the whole array."""
        return array_bytes(self.shape, self.dtype)


def make_row(path: str, leaf: Any, rule: str, layout: TensorLayout) -> LayoutRow:
    """Returns the row of one array.

    Args:
        path: The path of the array.
        leaf: An object with a global `shape` and a `dtype`.
        rule: The origin of the layout.
        layout: The layout.

    Raises:
        UserError: The layout does not divide the array.
    """
    shape = tuple(leaf.shape)
    shard_bytes = array_bytes(layout.shard_shape(shape), leaf.dtype)
    return LayoutRow(path=path, shape=shape, dtype=leaf.dtype, rule=rule, layout=layout, bytes_per_device=shard_bytes)


@dataclass(frozen=True, kw_only=True)
class LayoutTable:
    """The layouts of all arrays of one pytree on one mesh."""

    rows: tuple[LayoutRow, ...]
    """One row per leaf, in the order of `jax.tree.leaves`."""
    treedef: PyTreeDef
    """The structure of the tree."""
    mesh: DeviceMesh
    """The mesh of every layout."""
    notes: tuple[str, ...] = ()
    """Remarks on the layouts, one line each, printed below the rows."""

    @property
    def layouts(self) -> Any:
        """The TensorLayouts, as a pytree like the arrays."""
        return self._tree(row.layout for row in self.rows)

    def shardings(self, abstract: bool = False) -> Any:
        """Returns the NamedShardings, as a pytree like the arrays.

        Args:
            abstract: Uses the mesh without devices, for lowering only.

        Raises:
            UserError: `abstract` is False and devices of the mesh are not on this machine.
        """
        mesh = self.mesh.abstract_mesh if abstract else self.mesh.backend_mesh
        return self._tree(NamedSharding(mesh, row.layout.spec) for row in self.rows)

    @property
    def abstract_arrays(self) -> Any:
        """ShapeDtypeStructs without shardings, as a pytree like the arrays."""
        return self._tree(jax.ShapeDtypeStruct(row.shape, row.dtype) for row in self.rows)

    def sharded_arrays(self, *, abstract: bool) -> Any:
        """Returns the ShapeDtypeStructs with shardings, as a tree; `abstract`: on a mesh without devices."""
        shardings = self.shardings(abstract)
        return jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), self.abstract_arrays, shardings)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of all arrays together that each device holds."""
        return sum(row.bytes_per_device for row in self.rows)

    @property
    def bytes_global(self) -> int:
        """Bytes of all arrays together."""
        return sum(row.bytes_global for row in self.rows)

    @property
    def num_elements(self) -> int:
        """Elements of all arrays together."""
        return sum(prod(row.shape) for row in self.rows)

    def row(self, path: str) -> LayoutRow:
        """Returns the row of a path; UserError with the nearest path if it is unknown."""
        if path not in self._by_path:
            raise UserError(unknown_name("path", path, self._by_path))
        return self._by_path[path]

    def to_json(self) -> list[dict[str, Any]]:
        """Returns the rows as plain data.

        Returns:
            One dict per row: path, shape, dtype, rule, layout (a list per dim of axis names), bytes_per_device, bytes.
        """
        return [_row_to_json(row) for row in self.rows]

    def text(self, max_rows: int | None = None, max_width: int | None = None) -> str:
        """Formats the table for a terminal, one line for arrays that differ only in the numbers of their paths.

        Args:
            max_rows: The maximum number of lines; the ones with the most bytes are kept. None = all.
            max_width: The maximum length of a cell, at least 3; longer ones are shortened in the middle. None = all.
        """
        lines, remarks = self._lines(max_rows, max_width)
        return "\n".join([*_aligned(lines), *remarks])

    def __str__(self) -> str:
        return self.text(MAX_ROWS, MAX_WIDTH)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """Returns the table for a notebook."""
        lines, remarks = self._lines(MAX_ROWS, MAX_WIDTH)
        rows = []
        for cells in lines[1:]:
            rows.append("".join(f"<td>{html.escape(cell)}</td>" for cell in cells))
        headings = "".join(f"<th>{heading}</th>" for heading in HEADINGS)
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        below = "<br>".join(html.escape(remark) for remark in remarks)
        return f"<table><thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table><p>{below}</p>"

    def _lines(self, max_rows: int | None, max_width: int | None) -> tuple[list[tuple[str, ...]], list[str]]:
        """Returns the cells of each line, headings first, and the lines of text below the table."""
        stacks = stacks_of(self.rows)
        kept = largest(stacks, max_rows)
        lines: list[tuple[str, ...]] = [HEADINGS]
        for stack in kept:
            lines.append(tuple(_on_a_line(text, max_width) for text in _cells(stack)))
        notes = [printable(note) for note in self.notes]
        return lines, [*_left_out(stacks, kept), self._totals(), *notes]

    def _totals(self) -> str:
        parts = (
            counted(len(self.rows), "array"),
            counted(self.num_elements, "element"),
            f"{format_bytes(self.bytes_global)} in total",
            f"{format_bytes(self.bytes_per_device)} per device ({counted(self.mesh.size, 'device')})",
        )
        return ", ".join(parts)

    @cached_property
    def _by_path(self) -> dict[str, LayoutRow]:
        return {row.path: row for row in self.rows}

    def _tree(self, leaves: Iterable[Any]) -> Any:
        return jax.tree.unflatten(self.treedef, list(leaves))


def _row_to_json(row: LayoutRow) -> dict[str, Any]:
    return {
        "path": row.path,
        "shape": list(row.shape),
        "dtype": str(row.dtype),
        "rule": row.rule,
        "layout": [list(row.layout.axes_of_dim(dim)) for dim in range(len(row.shape))],
        "bytes_per_device": row.bytes_per_device,
        "bytes": row.bytes_global,
    }


def stacks_of(rows: Iterable[LayoutRow]) -> list[list[LayoutRow]]:
    """Groups rows that differ only in the numbers of their paths (the layers of a list of blocks), in order."""
    stacks: dict[Any, list[LayoutRow]] = {}
    for row in rows:
        key = (numberless(row.path), row.shape, row.dtype, row.rule, row.layout)
        stacks.setdefault(key, []).append(row)
    return list(stacks.values())


def stack_bytes(stack: Iterable[LayoutRow]) -> int:
    """Returns the bytes of some rows on each device."""
    return sum(row.bytes_per_device for row in stack)


def largest(stacks: list[list[LayoutRow]], most: int | None) -> list[list[LayoutRow]]:
    """Returns the `most` stacks with the most bytes, in order; None = all."""
    by_size = sorted(range(len(stacks)), key=lambda number: -stack_bytes(stacks[number]))
    return [stacks[number] for number in sorted(by_size[:most])]


def _cells(rows: list[LayoutRow]) -> tuple[str, ...]:
    first = rows[0]
    shape = "x".join(map(str, first.shape)) or "scalar"
    path = joined_path([row.path for row in rows])
    return path, shape, str(first.dtype), first.rule, str(first.layout), format_bytes(stack_bytes(rows))


def _on_a_line(text: str, most: int | None) -> str:
    line = printable(text).replace("\n", "\\n").replace("\t", "\\t")
    if most is None or len(line) <= most:
        return line
    end = (most - 1) // 2
    return f"{line[: most - 1 - end]}…{line[-end:]}"


def _left_out(stacks: list[list[LayoutRow]], kept: list[list[LayoutRow]]) -> list[str]:
    """Returns the line about omitted rows, if any."""
    if len(kept) == len(stacks):
        return []
    smaller = sum(map(stack_bytes, stacks)) - sum(map(stack_bytes, kept))
    omitted = len(stacks) - len(kept)
    return [
        f"... {omitted:,} smaller lines of {len(stacks):,} are omitted: {format_bytes(smaller)} per device; "
        "table.text() has all"
    ]


def _aligned(lines: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = []
    for cells in lines:
        first_cells = map(str.ljust, cells[:-1], widths)
        last_cell = cells[-1].rjust(widths[-1])
        aligned.append("  ".join([*first_cells, last_cell]))
    return aligned
