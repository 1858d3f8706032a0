"""One line of traffic: so many collectives of one kind over these mesh axes, moving so many bytes, in one step.

A strategy's `cost` predicts such lines from the layouts; `census` reads them from the compiled step. Both use the same
units, so that the two can be compared for equality.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..mesh.compat import varying_axes


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


def differing(
    predicted: Iterable[Collective], found: Iterable[Collective], compared: Collection[str] = ("count", "bytes")
) -> dict[tuple[str, tuple[str, ...]], str]:
    """What is not as predicted, in words, by kind and axes.

    Args:
        predicted: Merged lines.
        found: Merged lines of the compiled step.
        compared: Which figures count; whether there is such a line at all always does.
    """
    wanted, got = ({(line.kind, line.axes): line for line in lines} for lines in (predicted, found))
    told = {}
    for key in sorted({*wanted, *got}):
        one, other = wanted.get(key), got.get(key)
        if one and other and all(getattr(one, name) == getattr(other, name) for name in compared):
            continue
        texts = [f"{line.count:,} moving {line.bytes:,} bytes" if line else "none" for line in (one, other)]
        told[key] = f"{key[0]} over {' x '.join(key[1])}: {texts[0]} predicted, {texts[1]} found"
    return told


class Traffic(NamedTuple):
    """What one call of a part of a model (embed, a block, attention, head) moves on each device.

    Attributes:
        forward: collectives of the part itself.
        backward: those of its gradient.
        again: those of `forward` that backward needs once more where it computes the part again.
    """

    forward: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = ()
    again: tuple[Collective, ...] = ()

    def and_then(self, other: "Traffic") -> "Traffic":
        """What this part and another one move, one after the other."""
        return Traffic(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class CallCounts(NamedTuple):
    """How often one step runs each part of a model on a device, microbatches and recomputation counted.

    In a pipeline stages differ: each figure is that of the stage where it is largest.

    Attributes:
        embed: of the embedding, forward.
        embed_backward: of its gradient.
        block: of a block, forward.
        block_again: of a block, forward for what backward needs, in an action of its own.
        block_backward: of a block, backward to its input.
        block_weight: of a block, backward to its parameters.
        head: of the head, forward and backward.
        rows: blocks that a device stores.
        group_gradients: how often a group of parameters outside the blocks gets a gradient.
        others: the same for a parameter in no group.
    """

    embed: int
    embed_backward: int
    block: int
    block_again: int
    block_backward: int
    block_weight: int
    head: int
    rows: int
    group_gradients: Mapping[str, int]
    others: int


class StepCounts(NamedTuple):
    """What a strategy's cost depends on beside the plan: how often the model runs, and what it moves by itself.

    Attributes:
        calls: How often a step runs the parts of the model.
        own: The collectives of one step that the model holds itself, unmerged.
        sent: What a stage of a pipeline sends at every tick, up and down: per-device arrays by shape and dtype.
        metrics: Sums of the model's own metrics, two for each: they travel with those of the loss.
        unread: Of a parameter of blocks, by path: how many of a block's backward calls do not read it.
    """

    calls: CallCounts
    own: tuple[Collective, ...] = ()
    sent: tuple[jax.ShapeDtypeStruct, ...] = ()
    metrics: int = 0
    unread: Mapping[str, int] = MappingProxyType({})

    def own_over(self, axis: str) -> list[Collective]:
        """The model's own collectives over an axis (of several, the last)."""
        return [line for line in self.own if line.axes[-1] == axis]


def wire_bytes(dtype: Any, platform: str) -> int:
    """Bytes of one element as it travels; XLA's CPU backend moves bfloat16 as float32, and float16 as it is."""
    return 4 if jnp.dtype(dtype) == jnp.bfloat16 and platform == "cpu" else jnp.dtype(dtype).itemsize


def vary(value: Array, axes: Iterable[str]) -> Array:
    """Types a value inside `shard_map` as different on each device of these axes; the numbers stay as they are."""
    missing = tuple(axis for axis in axes if axis not in varying_axes(value))
    return lax.pcast(value, missing, to="varying") if missing else value


def varying_zeros(shape: tuple[int, ...], dtype: Any, like: Any) -> Array:
    """Zeros that vary over the mesh as what is computed from all leaves of `like` does: what a loop may carry."""
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(like)))
    return vary(jnp.zeros(shape, dtype), sorted(axes))
