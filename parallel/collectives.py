"""One line of traffic: so many collectives of one kind over these mesh axes, moving so many bytes, in one step.

A strategy's `cost` predicts such lines from the layouts; `census` reads them from the compiled step. Both use the same
units, so that the two can be compared for equality.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp


@dataclass(frozen=True, order=True)
class Collective:
    """Collectives of one kind over one set of mesh axes.

    Attributes:
        kind: HLO's name: all-reduce, all-gather, reduce-scatter, collective-permute or all-to-all.
        axes: the mesh axes that take part, in the order of the mesh.
        count: how many of them one step runs (a collective in a loop counts once a turn).
        bytes: bytes of the whole (unscattered) value as each device holds or gets it, summed over `count`: the operand
            of an all-reduce or reduce-scatter, the result of an all-gather, the operand of the others.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int

    def times(self, calls: int) -> "Collective":
        """The same, run so many times."""
        return replace(self, count=self.count * calls, bytes=self.bytes * calls)

    def __str__(self) -> str:
        return f"{self.kind} over {' x '.join(self.axes)}: {self.count} moving {self.bytes:,} bytes"


def merge(lines: Iterable[Collective]) -> tuple[Collective, ...]:
    """Adds up lines of one kind and one set of axes, and sorts them."""
    totals: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
    for line in lines:
        count, size = totals.get((line.kind, line.axes), (0, 0))
        totals[line.kind, line.axes] = (count + line.count, size + line.bytes)
    return tuple(Collective(kind, axes, *total) for (kind, axes), total in sorted(totals.items()) if total[0])


def wire_bytes(dtype: Any, platform: str) -> int:
    """Bytes of one element as it travels; XLA's CPU backend moves 16-bit floating-point numbers as 32-bit ones."""
    width = jnp.dtype(dtype).itemsize
    narrow_float = width == 2 and jnp.issubdtype(dtype, jnp.floating)
    return 4 if narrow_float and platform == "cpu" else width
