"""Estimates the memory of a step from its traced program, before a compiler sees it.

The traced operations run in order, and a value is in memory from its operation to its last use. Operations on single
elements are fused into those that read them: their results take no memory, unless a product, a collective or a loop
reads them. Results of movements are their operands. Loops hold what they stack from their start, and update in place
what they carry.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..mesh.compat import is_literal
from ..parallel.xla.graph import inner_programs
from ..parallel.xla.primitives import COLLECTIVES, GATHERS, PRODUCTS

BODIES = {"scan", "while", "cond", "shard_map"}
STORED = PRODUCTS | COLLECTIVES | BODIES | {"sort", "scatter", "scatter-add", "cumsum", "top_k", "ffi_call"}
"""Operations whose operands and results are in memory: no fusion crosses them."""
SAME = {
    *("reshape", "squeeze", "expand_dims", "transpose", "pcast", "pvary", "name", "copy", "copy_p", "stop_gradient"),
    *("optimization_barrier", "sharding_constraint", "dynamic_update_slice"),
}
"""Operations whose results are their operands, moved or updated in place."""


@dataclass(eq=False)
class Value:
    """An array on one device.

    Attributes:
        bytes: Its size.
        kind: "activations" that a loop stacks for a later one, "gradients" that it stacks, "communication" buffers of
            gathers, or "temporaries".
        last: The position of its last use.
        stored: True if it is in memory, and not only within a fusion.
    """

    bytes: int = 0
    kind: str = "temporaries"
    last: int = -1
    stored: bool = False


@dataclass(eq=False)
class Operation:
    """One operation of a program whose calls are inlined.

    Attributes:
        name: The primitive.
        reads: Its operands.
        writes: Its results.
        bodies: The programs that it runs, each with the position of its first input among `reads`.
        carried: Positions among `reads` of what a loop carries from turn to turn.
        stacked: Results that a loop stacks.
    """

    name: str
    reads: list[Value]
    writes: list[Value]
    bodies: list[tuple[Any, int]] = field(default_factory=list)
    carried: range = range(0)
    stacked: list[Value] = field(default_factory=list)

    @property
    def stores(self) -> bool:
        """True if no fusion crosses it."""
        return self.name in STORED or self.name.startswith("dot_product_attention")

    def overwrites(self, dying: list[Value]) -> list[Value]:
        """Returns those of the values that are last used here whose memory its results can take."""
        if self.name in ("scan", "while"):
            carried = [self.reads[number] for number in self.carried]
            return [value for value in dying if value in carried]
        return dying if self.bodies or not self.stores else []


def peak_of(jaxpr: Any, given: Sequence[Value] = ()) -> Counter[str]:
    """Returns the bytes by kind that a program needs at once.

    Args:
        jaxpr: The program.
        given: Its inputs, with the bytes of those that it may overwrite; by default none of them counts.
    """
    operations: list[Operation] = []
    inputs = list(given) or [Value(stored=True) for _ in [*jaxpr.constvars, *jaxpr.invars]]
    _find_lifetimes(operations, _inline(jaxpr, inputs, operations))
    live: Counter[str] = Counter()
    peak: Counter[str] = Counter()
    ending: dict[int, list[Value]] = {}

    def start(values: Sequence[Value]) -> None:
        for value in values:
            if value.stored:
                live[value.kind] += value.bytes
                ending.setdefault(value.last, []).append(value)

    def end(values: Sequence[Value]) -> None:
        for value in values:
            live[value.kind] -= value.bytes

    start(inputs)
    for position, operation in enumerate(operations):
        dying = ending.pop(position, [])
        overwritten = operation.overwrites(dying)
        end(overwritten)
        if operation.bodies:
            during = live + _peak_of_bodies(operation, overwritten)
            peak = max(peak, during, key=Counter.total)
        start(operation.writes)
        peak = max(peak, live.copy(), key=Counter.total)
        end([*(value for value in dying if value not in overwritten), *ending.pop(position, [])])
    return peak


def _peak_of_bodies(operation: Operation, overwritten: list[Value]) -> Counter[str]:
    """Returns the bytes while an operation runs its programs: those of the largest, and what it stacks meanwhile."""
    peak: Counter[str] = Counter()
    for jaxpr, first in operation.bodies:
        reads = operation.reads[first:]
        given = [
            Value(value.bytes if number in operation.carried or value in overwritten else 0, value.kind, stored=True)
            for number, value in enumerate(reads, first)
        ]
        constants = [Value(stored=True) for _ in jaxpr.constvars]
        peak = max(peak, peak_of(jaxpr, [*constants, *given]), key=Counter.total)
    for value in operation.stacked:
        peak[value.kind] += value.bytes
    return peak


def _inline(jaxpr: Any, inputs: Sequence[Value], operations: list[Operation]) -> list[Value]:
    """Appends the operations of a program, and returns its results."""
    values: dict[Any, Value] = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))

    def read(variable: Any) -> Value:
        return Value() if is_literal(variable) else values[variable]

    for equation in jaxpr.eqns:
        name, bodies = equation.primitive.name, inner_programs(equation)
        reads = [read(variable) for variable in equation.invars]
        if len(bodies) == 1 and name not in BODIES:
            constants = [Value(stored=True) for _ in bodies[0].constvars]
            results = _inline(bodies[0], [*constants, *reads[len(reads) - len(bodies[0].invars) :]], operations)
        elif name in SAME:
            results = reads[: len(equation.outvars)]
            operations.append(Operation(name, reads, []))
        else:
            kind = "communication" if name in GATHERS else "temporaries"
            results = [Value(_bytes(variable.aval), kind) for variable in equation.outvars]
            operations.append(_operation(equation, reads, results, bodies))
        values.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _operation(equation: Any, reads: list[Value], writes: list[Value], bodies: list[Any]) -> Operation:
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        first = params["num_consts"]
        carried = range(first, first + params["num_carry"])
        return Operation(name, reads, writes, [(bodies[0], 0)], carried, writes[params["num_carry"] :])
    if name == "while":
        first = params["cond_nconsts"]
        carried = range(first + params["body_nconsts"], len(reads))
        return Operation(name, reads, writes, [(params["body_jaxpr"].jaxpr, first)], carried)
    return Operation(name, reads, writes, [(body, len(reads) - len(body.invars)) for body in bodies])


def _bytes(aval: Any) -> int:
    return getattr(aval, "size", 0) * getattr(getattr(aval, "dtype", None), "itemsize", 0)


def _find_lifetimes(operations: list[Operation], results: list[Value]) -> None:
    """Finds the values that are in memory, and their last uses."""
    for value in results:
        value.last, value.stored = len(operations), True
    for operation in operations:
        if operation.stores or operation.name == "dynamic_update_slice":
            for value in [
                *operation.reads[: 1 if operation.name == "dynamic_update_slice" else None],
                *operation.writes,
            ]:
                value.stored = True
        elif operation.name.startswith(("reduce_", "arg")):
            for value in operation.writes:
                value.stored = True
    for position, operation in reversed([*enumerate(operations)]):
        later = [value.last for value in operation.writes if not value.stored and not operation.stores]
        for value in operation.reads:
            value.last = max(value.last, position, *later)
        for value in operation.stacked:
            value.kind = "activations" if value.last < len(operations) else "gradients"
