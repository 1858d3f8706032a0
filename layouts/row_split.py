"""The arithmetic of a batch: into how many parts its rows are cut, and which numbers of rows fit."""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple


class RowSplit(NamedTuple):
    """Into how many parts the rows of a batch are cut.

    Attributes:
        parts: What cuts them -> into how many parts.
    """

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """All parts; the rows of a batch have to be a multiple of it."""
        return prod(self.parts.values())

    def fits(self, rows: int) -> bool:
        """Whether every part gets equally many rows, and any at all."""
        return rows > 0 and rows % self.total == 0

    def nearest(self, rows: int) -> int:
        """The number of rows that fits and is nearest."""
        return max(self.total, round(rows / self.total) * self.total)

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.parts.items()) or "1 device"
