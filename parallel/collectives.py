"""Traffic lines: the count and bytes of all collectives of one kind over the same mesh axes in one step.

A strategy's `cost` predicts these lines from the layouts; `census` reads them from the compiled step. Both use the same
units, so that predicted and compiled lines can be compared for equality.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..layouts.tensor_layout import TensorLayout, without_axes
from ..mesh.compat import varying_axes

CollectiveKey: TypeAlias = tuple[str, tuple[str, ...]]
"""The kind and the axes of collectives."""


STRATEGY_SCOPE = "spmdkit_strategy"
"""The name scope of `strategy_scope`, which programs and profiles show."""


@dataclass(frozen=True, order=True)
class Collective:
    """Collectives of one kind over one set of mesh axes.

    Attributes:
        kind: The HLO name: all-reduce, all-gather, reduce-scatter, collective-permute or all-to-all.
        axes: The mesh axes that take part, in the order of the mesh.
        count: The number per step (a collective in a loop counts once per turn).
        bytes: The bytes of the whole (unscattered) value on each device, summed over `count`: the operand of an
            all-reduce or reduce-scatter, the result of an all-gather, the operand of the others.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int

    @property
    def key(self) -> CollectiveKey:
        """The kind and the axes, which lines that are added up have in common."""
        return self.kind, self.axes

    def times(self, calls: int) -> "Collective":
        """Returns the line for the given number of calls."""
        return replace(self, count=self.count * calls, bytes=self.bytes * calls)

    def __str__(self) -> str:
        return f"{self.kind} over {' x '.join(self.axes)}: {self.count} moving {self.bytes:,} bytes"


def merge(lines: Iterable[Collective]) -> tuple[Collective, ...]:
    """Adds up lines of one kind and one set of axes, and sorts them."""
    totals: dict[CollectiveKey, tuple[int, int]] = {}
    for line in lines:
        count, size = totals.get(line.key, (0, 0))
        totals[line.key] = (count + line.count, size + line.bytes)
    return tuple(Collective(kind, axes, *total) for (kind, axes), total in sorted(totals.items()) if total[0])


def differing(
    predicted: Iterable[Collective], found: Iterable[Collective], compared: Collection[str] = ("count", "bytes")
) -> dict[CollectiveKey, str]:
    """Describes the differences between prediction and program, by kind and axes.

    Args:
        predicted: Merged lines.
        found: Merged lines of the compiled step.
        compared: The figures to compare; a missing line is always a difference.
    """
    wanted, got = ({line.key: line for line in lines} for lines in (predicted, found))
    differences = {}
    for key in sorted({*wanted, *got}):
        one, other = wanted.get(key), got.get(key)
        if one and other and all(getattr(one, name) == getattr(other, name) for name in compared):
            continue
        texts = [f"{line.count:,} moving {line.bytes:,} bytes" if line else "none" for line in (one, other)]
        differences[key] = f"{key[0]} over {' x '.join(key[1])}: {texts[0]} predicted, {texts[1]} found"
    return differences


@dataclass(frozen=True)
class Amount:
    """The number and the bytes of some collectives."""

    count: int
    bytes: int

    def minus(self, other: "Amount") -> "Amount":
        """Returns the difference."""
        return Amount(self.count - other.count, self.bytes - other.bytes)


def amount(lines: Iterable[Collective], key: CollectiveKey) -> Amount:
    """Returns the count and the bytes of the collectives of one kind over one set of axes."""
    same = [line for line in lines if line.key == key]
    return Amount(sum(line.count for line in same), sum(line.bytes for line in same))


def subtract(lines: Iterable[Collective], taken: Sequence[Collective]) -> tuple[Collective, ...]:
    """Returns what remains of merged lines without some of their collectives."""
    rest: list[Collective] = []
    for line in lines:
        less = amount(taken, line.key)
        rest.append(replace(line, count=line.count - less.count, bytes=line.bytes - less.bytes))
    return tuple(line for line in rest if line.count or line.bytes)


class Traffic(NamedTuple):
    """The collectives of one call of a part of a model (embed, a block, attention, head) on each device.

    Attributes:
        forward: The collectives of the part.
        backward: The collectives of its gradient.
        again: The collectives of `forward` that backward repeats if it recomputes the part.
    """

    forward: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = ()
    again: tuple[Collective, ...] = ()

    def and_then(self, other: "Traffic") -> "Traffic":
        """Returns the traffic of this part followed by another one."""
        return Traffic(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class CallCounts(NamedTuple):
    """The calls of each part of a model in one step on a device, including microbatches and recomputation.

    In a pipeline, each count is that of the stage with the most calls.

    Attributes:
        embed: The embedding, forward.
        embed_backward: The embedding, backward.
        block: A block, forward.
        block_again: A block, forward in a recompute action.
        block_backward: A block, backward to its input.
        block_weight: A block, backward to its parameters.
        head: The head, forward and backward.
        rows: The number of blocks that a device stores.
        group_gradients: The gradient computations of each group of parameters outside the blocks.
        others: The gradient computations of all other parameters.
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
    """The inputs of a strategy's cost besides the plan: the calls of the model, and the model's own collectives.

    Attributes:
        calls: The calls of the parts of the model in a step.
        own: The model's own collectives in one step, unmerged.
        sent: The per-device arrays that pipeline stages send in one run of the timetable, up and down, and how often.
        metrics: The number of sums in the model's own metrics, two for each, which are reduced with the loss.
        unread: For each parameter of blocks, by path, the number of a block's backward calls that do not read it.
    """

    calls: CallCounts
    own: tuple[Collective, ...] = ()
    sent: tuple[tuple[jax.ShapeDtypeStruct, int], ...] = ()
    metrics: int = 0
    unread: Mapping[str, int] = MappingProxyType({})


def strategy_scope() -> AbstractContextManager[Any]:
    """Marks the collectives that are traced within a `with` block as those of a strategy.

    Strategies use it for collectives in the part of a program that also contains those of the model.
    """
    return jax.named_scope(STRATEGY_SCOPE)


def own_collectives(axis: str, plan: Any, counts: StepCounts, platform: str) -> list[Collective]:
    """Implements `cost`, as `partial(own_collectives, AXIS)`, for a strategy without collectives besides the model's.

    Collectives over several axes count for the last one.
    """
    return [line for line in counts.own if line.axes[-1] == axis]


def wire_bytes(dtype: Any, platform: str) -> int:
    """Returns the bytes of one element on the wire; XLA's CPU backend sends bfloat16 as float32, but float16
    unchanged."""
    return 4 if jnp.dtype(dtype) == jnp.bfloat16 and platform == "cpu" else jnp.dtype(dtype).itemsize


def axis_size(axis: str) -> int:
    """Returns the number of devices along a manual axis of the current trace; 1 outside a trace with that axis."""
    try:
        return lax.axis_size(axis)
    except NameError:
        return 1


def vary(value: Array, axes: Iterable[str]) -> Array:
    """Types a value inside `shard_map` as varying over these axes; the numbers do not change."""
    missing = tuple(axis for axis in axes if axis not in varying_axes(value))
    return lax.pcast(value, missing, to="varying") if missing else value


def keep_split(
    collective: Callable[..., Array], value: Array, over: Any, layout: TensorLayout, dim: int, **options: Any
) -> Array:
    """Runs a collective inside `shard_map` on a value that stays split over the axes left to XLA.

    XLA would gather the value over these axes first. In a nested `shard_map`, each device has only its own part.

    Args:
        collective: `collective(value, over, **options)`, a collective over manual axes that changes one dim.
        value: The value on the devices along the manual axes.
        over: The manual axes of the collective.
        layout: The layout of the value over all axes; those that are not manual are left to XLA.
        dim: The dim that the collective changes. If an axis left to XLA splits it too, XLA gathers over that axis.
        **options: The other arguments of the collective.
    """

    def run(part: Array) -> Array:
        return collective(part, over, **options)

    manual = jax.sharding.get_abstract_mesh().manual_axes
    left = without_axes(layout, {*manual, *layout.axes_of_dim(dim)})
    axes, checks = set(left.used_axes), bool(varying_axes(value))
    if not axes:
        return run(value)
    nested = jax.shard_map(run, in_specs=left.spec, out_specs=left.spec, axis_names=axes, check_vma=checks)
    return nested(value)


def exchange_sum(value: Array, axes: tuple[str, ...], *, dtype: str, scatter_dimension: int, tiled: bool) -> Array:
    """Reduce-scatters a value inside `shard_map` like `lax.psum_scatter`, but sums in a wider dtype than it sends.

    A ring passes on sums, so it sends the dtype of the sum. In an all-to-all, every device sends its parts as they are.
    """
    received = lax.all_to_all(value, axes, scatter_dimension, scatter_dimension, tiled=tiled)
    pieces = (*value.shape[:scatter_dimension], lax.axis_size(axes), -1, *value.shape[scatter_dimension + 1 :])
    return jnp.sum(received.reshape(pieces), axis=scatter_dimension, dtype=dtype)


def varying_zeros(shape: tuple[int, ...], dtype: Any, like: Any) -> Array:
    """Returns zeros for the carry of a loop; they vary over every mesh axis over which a leaf of `like` varies."""
    return vary(jnp.zeros(shape, dtype), sorted(frozenset().union(*map(varying_axes, jax.tree.leaves(like)))))
