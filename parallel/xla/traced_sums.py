"""Predicts, from a traced program, the collectives of a model that XLA will compile.

    unused              XLA removes a collective that no result depends on
    independent         XLA combines all-reduces of one kind over the same axes into one, and no other collectives
    inside a loop       counts once per turn, and is not combined with those outside
    of a strategy       is not counted (`strategy_scope`): the costs of the strategies are

The number of all-reduces is therefore the length of the longest chain in which each depends on the previous one; bytes
add up.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from ...mesh.compat import Equation, Variable, is_literal, name_scopes
from ..collectives import STRATEGY_SCOPE, Collective, wire_bytes
from .graph import Graph, dependencies, inner_programs
from .primitives import EXCHANGES, GATHERS, REDUCTIONS, SCATTERS, SUMS


class SumKey(NamedTuple):
    """The properties that all-reduces must share for XLA to combine them.

    Attributes:
        kind: "sum", or the name of the primitive.
        axes: The mesh axes, in the order of the mesh.
        number: The kind and wire bytes of one element, such as "f4".
    """

    kind: str
    axes: tuple[str, ...]
    number: str


class _Reduction(NamedTuple):
    """One all-reduce of a program.

    Attributes:
        key: The key of the all-reduces that it can be combined with.
        place: The position, from 1, in the longest chain of its key that ends in this all-reduce.
        bytes: The bytes that it moves.
        waited_for: Whether the final all-reduce waits for it.
    """

    key: SumKey
    place: int
    bytes: int
    waited_for: bool


def all_reduces(
    graph: Graph, first: Sequence[Variable], after: SumKey, *, sizes: Mapping[str, int], platform: str
) -> list[Collective]:
    """Returns the all-reduces of a program, without one final all-reduce that depends on some of its results.

    Args:
        graph: The program.
        first: The results that the final all-reduce depends on. XLA combines the final one with every all-reduce of its
            key that can be delayed until then.
        after: The key of the final all-reduce, which is not counted.
        sizes: Mesh axis -> size, in the order of the mesh.
        platform: The platform of the program.

    Returns:
        One line for each key, and further lines for each loop. A count of 0 means bytes that the final all-reduce
        moves.
    """
    lines = [line for eqn in dependencies(graph, graph.outputs)[0] for line in _inside(eqn, sizes, platform)]
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
    """Yields the all-reduces outside loops that a result depends on."""
    waited_for = set(map(id, dependencies(graph, first)[0]))
    places: dict[Variable, dict[SumKey, int]] = {}
    for eqn in reversed(dependencies(graph, graph.outputs)[0]):
        behind: dict[SumKey, int] = {}
        for operand in eqn.invars:
            for key, place in () if is_literal(operand) else places.get(operand, {}).items():
                behind[key] = max(place, behind.get(key, 0))
        if key := _key(eqn, sizes, platform):
            behind[key] = behind.get(key, 0) + 1
            yield _Reduction(key, behind[key], _bytes(eqn, platform), id(eqn) in waited_for)
        places.update(dict.fromkeys(eqn.outvars, behind))


def other_collectives(graph: Graph, *, sizes: Mapping[str, int], platform: str) -> list[Collective]:
    """Returns the collectives of a program that are not all-reduces, one line for each.

    Args:
        graph: The program.
        sizes: Mesh axis -> size, in the order of the mesh.
        platform: The platform of the program.
    """
    lines: list[Collective] = []
    for eqn in dependencies(graph, graph.outputs)[0]:
        if _is_of_strategy(eqn):
            continue
        lines += _exchange(eqn, sizes, platform)
        for inner in inner_programs(eqn):
            found = other_collectives(_graph_of(inner), sizes=sizes, platform=platform)
            lines += [line.times(eqn.params.get("length", 1)) for line in found]
    return lines


def _exchange(eqn: Equation, sizes: Mapping[str, int], platform: str) -> list[Collective]:
    """Returns the line of an operation that gathers, scatters or exchanges over several devices; otherwise none."""
    kind = _KINDS.get(eqn.primitive.name)
    if kind is None:
        return []
    given = eqn.params["axis_name"]
    names = given if isinstance(given, tuple | list) else (given,)
    axes = tuple(axis for axis, size in sizes.items() if axis in names and size > 1)
    if not axes:
        return []
    arrays = eqn.outvars if kind == "all-gather" else eqn.invars
    moved = sum(each.aval.size * wire_bytes(each.aval.dtype, platform) for each in arrays)
    return [Collective(kind, axes, 1, moved)]


_KINDS = {
    **dict.fromkeys(GATHERS, "all-gather"),
    **dict.fromkeys(SCATTERS, "reduce-scatter"),
    **EXCHANGES,
}
"""Primitive -> the kind of its collective in a compiled program."""


def _is_of_strategy(eqn: Equation) -> bool:
    return STRATEGY_SCOPE in name_scopes(eqn)


def _graph_of(program: Any) -> Graph:
    """Returns a program inside an operation as a graph."""
    return Graph(list(program.eqns), list(program.invars), list(program.outvars), {}, program)


def sum_key(axes: Sequence[str], dtype: Any, platform: str) -> SumKey:
    """Returns the key of a floating-point sum."""
    return SumKey("sum", tuple(axes), f"f{wire_bytes(dtype, platform)}")


def _key(eqn: Equation, sizes: Mapping[str, int], platform: str) -> SumKey | None:
    """Returns the key of an operation; None if it is not an all-reduce, or over one device."""
    if eqn.primitive.name not in REDUCTIONS or _is_of_strategy(eqn):
        return None
    axes = tuple(axis for axis, size in sizes.items() if axis in eqn.params["axes"] and size > 1)
    dtype = eqn.invars[0].aval.dtype
    number = "f" if jnp.issubdtype(dtype, jnp.floating) else dtype.kind
    kind = "sum" if eqn.primitive.name in SUMS else eqn.primitive.name
    return SumKey(kind, axes, f"{number}{wire_bytes(dtype, platform)}") if axes else None


def _bytes(eqn: Equation, platform: str) -> int:
    return sum(each.aval.size * wire_bytes(each.aval.dtype, platform) for each in eqn.invars)


def _inside(eqn: Equation, sizes: Mapping[str, int], platform: str) -> list[Collective]:
    """Returns the all-reduces of the programs inside an operation: for a loop, once per turn."""
    lines = []
    for inner in inner_programs(eqn):
        part = _graph_of(inner)
        lines_of_turn = all_reduces(part, inner.outvars, SumKey("", (), ""), sizes=sizes, platform=platform)
        lines += [line.times(eqn.params.get("length", 1)) for line in lines_of_turn]
    return lines
