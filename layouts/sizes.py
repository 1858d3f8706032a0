"""Bytes of arrays and counts of things, and how to write them for people."""

from collections.abc import Sequence
from math import prod
from typing import Any

from ..mesh.text import counted as counted

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def array_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Counts the bytes of an array.

    Args:
        shape: Its shape; a shard's shape gives the shard's bytes.
        dtype: Its dtype.

    Returns:
        Number of elements times bytes per element.
    """
    return prod(map(int, shape)) * dtype.itemsize  # of NumPy's sizes the product would run over


def format_bytes(num_bytes: float) -> str:
    """Writes a number of bytes for people.

    Args:
        num_bytes: Bytes, at least 0.

    Returns:
        For example "512 B", "1.5 KiB", "2 GiB".
    """
    for unit in UNITS[:-1]:
        if num_bytes < (1024 if unit == "B" else 1023.95):  # rounding must not give 1024 of a unit
            return _short(num_bytes, unit)
        num_bytes /= 1024
    return _short(num_bytes, UNITS[-1])


def _short(number: float, unit: str) -> str:
    return f"{number:.1f}".removesuffix(".0") + f" {unit}"
