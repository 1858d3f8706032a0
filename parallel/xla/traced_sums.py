"""The all-reduces of a traced program, counted as XLA will compile them, before it does.

    what nothing is made of          is left out
    what does not wait for another   is combined: all-reduces of one kind over the same axes into one of all operands
    what is in a loop                counts once a turn, and is not combined with what is outside

So their number is the length of the longest chain in which each waits for the one before; their bytes add up.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from ...mesh.compat import Equation, Variable, is_literal
from ..collectives import Collective, wire_bytes
from .equations import inner_programs
from .graph import Graph, made_of
from .primitives import REDUCTIONS, SUMS


class SumKey(NamedTuple):
    """What all-reduces have in common that XLA combines.

    Attributes:
        kind: "sum", or the primitive's name.
        axes: Mesh axes, in the order of the mesh.
        number: Kind and bytes of one number on the wire, such as "f4".
    """

    kind: str
    axes: tuple[str, ...]
    number: str


class _Reduction(NamedTuple):
    """One all-reduce of a program.

    Attributes:
        key: What it may be combined by.
        place: Its place in the longest chain of its key that ends in it, from 1 on.
        bytes: What it moves.
        waited_for: Whether the last all-reduce waits for it.
    """

    key: SumKey
    place: int
    bytes: int
    waited_for: bool


def all_reduces(
    graph: Graph, first: Sequence[Variable], after: SumKey, *, sizes: Mapping[str, int], platform: str
) -> list[Collective]:
    """The all-reduces of a program beside those of a last one that waits for some of its results.

    Args:
        graph: The program.
        first: Its results that the last all-reduce waits for; it takes along what others need no earlier.
        after: The key of that one; it is not counted itself.
        sizes: Mesh axis -> size, in the order of the mesh.
        platform: Where the program runs.

    Returns:
        One line for each key, and some for each loop; a count of 0 is bytes that the last one takes along.
    """
    lines = [line for eqn in made_of(graph, graph.outputs)[0] for line in _inside(eqn, sizes, platform)]
    found = list(_reductions(graph, first, sizes, platform))
    for key in dict.fromkeys(each.key for each in found):
        own = [each for each in found if each.key == key]
        before = max((each.place for each in own if each.waited_for), default=0)
        count = max(before, max(each.place for each in own) - (key == after))
        lines.append(Collective("all-reduce", key.axes, count, sum(each.bytes for each in own)))
    return lines


def _reductions(
    graph: Graph, first: Sequence[Variable], sizes: Mapping[str, int], platform: str
) -> Iterator[_Reduction]:
    """Those outside loops that a result is made of."""
    waited_for = set(map(id, made_of(graph, first)[0]))
    places: dict[Variable, dict[SumKey, int]] = {}
    for eqn in reversed(made_of(graph, graph.outputs)[0]):
        behind: dict[SumKey, int] = {}
        for operand in eqn.invars:
            for key, place in () if is_literal(operand) else places.get(operand, {}).items():
                behind[key] = max(place, behind.get(key, 0))
        if key := _key(eqn, sizes, platform):
            behind[key] = behind.get(key, 0) + 1
            yield _Reduction(key, behind[key], _bytes(eqn, platform), id(eqn) in waited_for)
        places.update(dict.fromkeys(eqn.outvars, behind))


def sum_key(axes: Sequence[str], dtype: Any, platform: str) -> SumKey:
    """The key of a sum of floating-point numbers."""
    return SumKey("sum", tuple(axes), f"f{wire_bytes(dtype, platform)}")


def _key(eqn: Equation, sizes: Mapping[str, int], platform: str) -> SumKey | None:
    """What an operation reduces over; None where it is no all-reduce, or over one device."""
    if eqn.primitive.name not in REDUCTIONS:
        return None
    axes = tuple(axis for axis, size in sizes.items() if axis in eqn.params["axes"] and size > 1)
    dtype = eqn.invars[0].aval.dtype
    number = "f" if jnp.issubdtype(dtype, jnp.floating) else dtype.kind
    kind = "sum" if eqn.primitive.name in SUMS else eqn.primitive.name
    return SumKey(kind, axes, f"{number}{wire_bytes(dtype, platform)}") if axes else None


def _bytes(eqn: Equation, platform: str) -> int:
    return sum(each.aval.size * wire_bytes(each.aval.dtype, platform) for each in eqn.invars)


def _inside(eqn: Equation, sizes: Mapping[str, int], platform: str) -> list[Collective]:
    """Those of the programs that an operation runs: of a loop, once a turn."""
    lines = []
    for inner in inner_programs(eqn):
        part = Graph(list(inner.eqns), list(inner.invars), list(inner.outvars), {}, inner)
        of_turn = all_reduces(part, inner.outvars, SumKey("", (), ""), sizes=sizes, platform=platform)
        lines += [line.times(eqn.params.get("length", 1)) for line in of_turn]
    return lines
