"""Bytes of arrays, formatted sizes and counts, and the split of a batch's rows."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import jax

from ..mesh.errors import counted as counted

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def array_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Returns the bytes of an array, or of a shard for a shard's shape."""
    return prod(map(int, shape)) * dtype.itemsize  # NumPy integers would overflow


def format_bytes(num_bytes: float) -> str:
    """Formats a number of bytes: "512 B", "1.5 KiB", "2 GiB"."""
    if num_bytes < 1024:
        return _short(num_bytes, "B")
    for unit in UNITS[1:-1]:
        num_bytes /= 1024
        if num_bytes < 1023.95:  # so that rounding never gives 1024 of a unit
            return _short(num_bytes, unit)
    return _short(num_bytes / 1024, UNITS[-1])


def _short(number: float, unit: str) -> str:
    return f"{number:.1f}".removesuffix(".0") + f" {unit}"


def format_mesh(sizes: Mapping[str, int]) -> str:
    """Formats axes with their sizes: "data 2 x fsdp 4"; "1 device" if there are none."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items()) or "1 device"


class RowSplit(NamedTuple):
    """The split of a batch's rows: name of an axis or option -> number of parts."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """The number of parts; the rows of a batch must be a multiple of it."""
        return prod(self.parts.values())

    def part(self, batch: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes and dtypes of one part of a batch."""
        shapes = {}
        for name, array in batch.items():
            rows = array.shape[0] // self.total
            shapes[name] = jax.ShapeDtypeStruct((rows, *array.shape[1:]), array.dtype)
        return shapes

    def fits(self, rows: int) -> bool:
        """Returns True if every part has the same positive number of rows."""
        return rows > 0 and rows % self.total == 0

    def nearest(self, rows: int) -> int:
        """Returns the nearest number of rows that fits."""
        return max(self.total, round(rows / self.total) * self.total)

    def __str__(self) -> str:
        return format_mesh(self.parts)
