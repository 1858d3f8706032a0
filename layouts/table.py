"""The layout table: for every array of a tree its path, shape, rule, layout and bytes per device."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from html import escape
from math import prod
from typing import Any

import jax
from jax.sharding import NamedSharding

from ..mesh.compat import PyTreeDef
from ..mesh.device_mesh import DeviceMesh
from ..mesh.errors import UserError
from ..mesh.near_miss import unknown_name
from ..mesh.text import printable
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
    """Why it has this layout: the rule's key, or the default's or the policy's reason."""
    layout: TensorLayout
    """Its layout, on the table's mesh."""
    bytes_per_device: int
    """Bytes each device holds."""

    @property
    def bytes_global(self) -> int:
        """Bytes of the whole array."""
        return array_bytes(self.shape, self.dtype)


def make_row(path: str, leaf: Any, rule: str, layout: TensorLayout) -> LayoutRow:
    """Builds the row of one array.

    Args:
        path: Its path.
        leaf: Anything with a global `shape` and a `dtype`.
        rule: Why it has this layout.
        layout: A layout that divides it.

    Returns:
        The row.

    Raises:
        UserError: If the layout does not divide the array.
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

    @property
    def specs(self) -> Any:
        """The PartitionSpecs, as a pytree like the arrays."""
        return self._tree(row.layout.spec for row in self.rows)

    def shardings(self, abstract: bool = False) -> Any:
        """Gives the NamedShardings, as a pytree like the arrays.

        Args:
            abstract: True for shardings over the mesh without devices, for lowering only.

        Returns:
            The pytree of NamedShardings.

        Raises:
            UserError: If not abstract and the mesh has devices that are not on this machine.
        """
        mesh = self.mesh.abstract_mesh if abstract else self.mesh.backend_mesh
        return self._tree(NamedSharding(mesh, row.layout.spec) for row in self.rows)

    @property
    def abstract_arrays(self) -> Any:
        """ShapeDtypeStructs without shardings, as a pytree like the arrays."""
        return self._tree(jax.ShapeDtypeStruct(row.shape, row.dtype) for row in self.rows)

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
        """Finds the row of a path.

        Args:
            path: Names joined by "/".

        Returns:
            The row.

        Raises:
            UserError: If there is no such path; names the nearest.
        """
        if path not in self._by_path:
            raise UserError(unknown_name("path", path, self._by_path))
        return self._by_path[path]

    def to_json(self) -> list[dict[str, Any]]:
        """Gives the rows as plain data.

        Returns:
            One dict per row: path, shape, dtype, rule, layout (a list per dim of axis names), bytes_per_device, bytes.
        """
        return [
            {
                "path": row.path,
                "shape": list(row.shape),
                "dtype": str(row.dtype),
                "rule": row.rule,
                "layout": [list(row.layout.axes_of_dim(dim)) for dim in range(len(row.shape))],
                "bytes_per_device": row.bytes_per_device,
                "bytes": row.bytes_global,
            }
            for row in self.rows
        ]

    def text(self, max_rows: int | None = None, max_width: int | None = None) -> str:
        """Writes the table for a terminal, one line for the arrays that differ only in the numbers of their paths.

        Args:
            max_rows: The most lines; of more, those of the most bytes are kept. None for all of them.
            max_width: The most characters of a cell, at least 3; a longer one loses its middle. None for whole cells.

        Returns:
            Lines of text, control characters escaped.
        """
        stacks = stacks_of(self.rows)
        kept = largest(stacks, max_rows)
        lines = [HEADINGS, *(tuple(_on_a_line(text, max_width) for text in _cells(stack)) for stack in kept)]
        notes = (printable(note) for note in self.notes)
        return "\n".join([*_aligned(lines), *_left_out(stacks, kept), self._totals(), *notes])

    def __str__(self) -> str:
        return self.text(MAX_ROWS, MAX_WIDTH)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """The table as a notebook shows it."""
        stacks = stacks_of(self.rows)
        kept = largest(stacks, MAX_ROWS)
        left = 'style="text-align: left"'
        heads = "".join(f"<th {left}>{name}</th>" for name in HEADINGS)
        lines = "".join(
            "<tr>" + "".join(f"<td {left}>{escape(printable(text))}</td>" for text in _cells(stack)) + "</tr>"
            for stack in kept
        )
        notes = "<br>".join(escape(line) for line in (*_left_out(stacks, kept), self._totals(), *self.notes))
        return (
            f'<div style="overflow-x: auto"><table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>'
            f"<p>{notes}</p></div>"
        )

    def _totals(self) -> str:
        parts = (
            counted(len(self.rows), "array"),
            counted(self.num_elements, "element"),
            f"{format_bytes(self.bytes_global)} in all",
            f"{format_bytes(self.bytes_per_device)} per device ({counted(self.mesh.size, 'device')})",
        )
        return ", ".join(parts)

    @cached_property
    def _by_path(self) -> dict[str, LayoutRow]:
        return {row.path: row for row in self.rows}

    def _tree(self, leaves: Iterable[Any]) -> Any:
        return jax.tree.unflatten(self.treedef, list(leaves))


def stacks_of(rows: Iterable[LayoutRow]) -> list[list[LayoutRow]]:
    """Puts rows together that differ only in the numbers of their paths (the layers of a list of blocks).

    Args:
        rows: Rows of a table.

    Returns:
        At least one row each, in the order of the first of them.
    """
    stacks: dict[Any, list[LayoutRow]] = {}
    for row in rows:
        stacks.setdefault((numberless(row.path), row.shape, row.dtype, row.rule, row.layout), []).append(row)
    return list(stacks.values())


def stack_bytes(stack: Iterable[LayoutRow]) -> int:
    """Bytes of some rows together that each device holds."""
    return sum(row.bytes_per_device for row in stack)


def largest(stacks: list[list[LayoutRow]], most: int | None) -> list[list[LayoutRow]]:
    """Keeps the stacks of the most bytes.

    Args:
        stacks: As `stacks_of` gives them.
        most: How many to keep; None for all.

    Returns:
        At most so many, in the order given.
    """
    if most is None or len(stacks) <= most:
        return stacks
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
    """The line that says how many lines are missing; none where none are."""
    if len(kept) == len(stacks):
        return []
    smaller = sum(map(stack_bytes, stacks)) - sum(map(stack_bytes, kept))
    return [
        f"... {len(stacks) - len(kept):,} smaller lines of {len(stacks):,} are left out: {format_bytes(smaller)} per "
        "device; table.text() has all"
    ]


def _aligned(lines: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = []
    for cells in lines:
        *texts, size = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        aligned.append("  ".join([*texts, size.strip().rjust(widths[-1])]))
    return aligned
