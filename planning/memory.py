"""The analytic memory of a run, before a compiler sees it, and changes that would need less of it.

A value is in memory from its operation to its last use. Operations run in the traced order, except in loops: XLA's
latency-hiding scheduler runs what the next turn does not need, such as the gradients of weights, as late as possible
(`_turns`). Operations on single elements are fused into those that read them: their results take no memory, unless a
product, a collective or a loop reads them. Results of movements are their operands. Loops hold what they stack from
their start, and update in place what they carry. Zeros of one size are made together (`_join_zeros`). A gather along a
dim inside others arrives with that dim outermost, and is copied to the layout of the products; if it gathers slices of
an input, XLA copies that whole input for all of them.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..configs.schema import Config
from ..mesh.compat import carried_by_scan, is_literal
from ..mesh.devices import list_devices
from ..mesh.errors import UserError
from ..mesh.targets import compiling_for
from ..parallel.model import AbstractBatch, BlockModel
from ..parallel.sharding.strategies import option_types
from ..parallel.step.train_step import Step
from ..parallel.xla.graph import equations, inner_programs
from ..parallel.xla.primitives import COLLECTIVES, GATHERS, PRODUCTS
from ..runtime.build_run import Built, build
from ..runtime.compilation import DOUBLE_BUFFERING
from ..runtime.explain import state_bytes

BODIES = {"scan", "while", "cond", "shard_map"}
STORED = PRODUCTS | COLLECTIVES | BODIES | {"sort", "scatter", "scatter-add", "cumsum", "top_k", "ffi_call"}
"""Operations whose operands and results are in memory: no fusion crosses them."""
SAME = {
    *("reshape", "squeeze", "expand_dims", "transpose", "pcast", "pvary", "name", "copy", "copy_p", "stop_gradient"),
    *("optimization_barrier", "sharding_constraint", "dynamic_update_slice"),
}
"""Operations whose results are their operands, moved or updated in place."""
SLICES = {"dynamic_slice": 0, "convert_element_type": 0, "cond": -1}
"""Operations -> the position of the operand that they read a slice of; `cond` chooses by platform if that one waits."""


@dataclass(frozen=True)
class AnalyticMemory:
    """The memory that the layouts and the traced program of a step imply, in bytes of each device.

    Attributes:
        state: Kind -> bytes: parameters, optimizer, gradients, batch.
        activations: What is kept for backward, when the step needs the most memory: in loops over blocks, or without
            such loops, by all operations.
        communication: Parameters and activations that it has gathered at that time.
        other: All else at that time, among it the gradients so far.
    """

    state: dict[str, int]
    activations: int
    communication: int
    other: int

    @property
    def peak_bytes(self) -> int:
        """The most memory that a device needs: the state, and the gradients or what the program needs besides."""
        kept = sum(self.state.values()) - self.state["gradients"]
        return kept + max(self.activations + self.communication + self.other, self.state["gradients"])


@dataclass(frozen=True)
class Remedy:
    """A change of a config that needs less memory.

    Attributes:
        change: The keys and their new values.
        peak_bytes: The analytic memory with it.
    """

    change: str
    peak_bytes: int


def analytic_memory(built: Built) -> AnalyticMemory:
    """Returns the memory of a step, from its layouts and its traced program."""
    peak = step_peak(built.step, built.batch)
    activations = peak["activations"]
    communication = peak["communication"]
    return AnalyticMemory(state_bytes(built), activations, communication, peak.total() - activations - communication)


def step_peak(step: Step, batch: AbstractBatch) -> Counter[str]:
    """Returns the bytes by kind that a step needs at once on a device, without its state.

    Args:
        step: The step.
        batch: The global shapes of a batch.
    """
    with compiling_for(step.plan.mesh.target):
        program = step.trace(batch).jaxpr.jaxpr
    on_a_device = [each.params["jaxpr"] for each in equations(program) if each.primitive.name == "shard_map"]
    unrolled = 2 if dict(step.plan.options.xla).get(DOUBLE_BUFFERING) else 1
    has_blocks = isinstance(step.model, BlockModel)
    peaks = (peak_of(each, unrolled, has_blocks=has_blocks) for each in on_a_device)
    return max(peaks, key=Counter.total, default=Counter())


def find_remedies(config: Config, target: str, peak_bytes: int) -> tuple[Remedy, ...]:
    """Returns changes after which a run needs less than `peak_bytes`, by the analytic memory, the largest saving last.

    Args:
        config: The run's configuration.
        target: The accelerators.
        peak_bytes: The analytic memory without a change.
    """
    found = []
    for change, changed in _changes(config, list_devices(target=target)):
        try:
            needed = analytic_memory(build(changed, devices=list_devices(target=target))).peak_bytes
        except UserError:  # the batch has too few rows, or the model does not split this way
            continue
        if needed < peak_bytes:
            found.append(Remedy(change, needed))
    return tuple(sorted(found, key=lambda remedy: -remedy.peak_bytes))


def _changes(config: Config, devices: list[str]) -> Iterator[tuple[str, Config]]:
    """Yields changes of a config: recomputation, microbatches, and more shards."""
    policies = {"": config.train.remat} | ({} if config.train.remat == "full" else {"train.remat=full": "full"})
    factors = [1] if "pipe" in config.strategy else [1, 2, 4, 8]
    for policy, remat in policies.items():
        for factor in factors:
            accumulate = factor * config.train.accumulate
            words = [policy] * bool(policy) + [f"train.accumulate={accumulate}"] * (factor > 1)
            if words:
                train = replace(config.train, remat=remat, accumulate=accumulate)
                yield " ".join(words), replace(config, train=train)
    others: dict[str, Any] = {name: value for name, value in config.strategy.items() if name not in ("data", "fsdp")}
    taken = 1
    for options in others.values():
        taken *= max(options.size, 1)
    size = len(devices) // taken
    if getattr(config.strategy.get("fsdp"), "size", 1) not in (size, -1):
        strategy = {"fsdp": option_types()["fsdp"](size=size), **others}
        yield f"strategy.fsdp={size} without strategy.data", replace(config, strategy=strategy)


@dataclass(eq=False)
class Value:
    """An array on one device.

    Attributes:
        bytes: Its size.
        kind: "activations" that a loop stacks for a later one, or without such loops, that backward reads of forward;
            "gradients" that a loop stacks; "communication" buffers of gathers; or "temporaries".
        last: The position of its last use.
        stored: True if it is in memory, and not only within a fusion.
        moved: True if it has the layout of a gather along a dim inside others.
        source: The input of the program that it is, or is a slice of.
        copied: True of an input if slices of it are gathered along a dim inside others.
    """

    bytes: int = 0
    kind: str = "temporaries"
    last: int = -1
    stored: bool = False
    moved: bool = False
    source: "Value | None" = None
    copied: bool = False


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
        length: The turns of a loop, if they are known.
        is_backward: True if it computes gradients, or repeats forward for them.
    """

    name: str
    reads: list[Value]
    writes: list[Value]
    bodies: list[tuple[Any, int]] = field(default_factory=list)
    carried: range = range(0)
    stacked: list[Value] = field(default_factory=list)
    length: int = 1
    is_backward: bool = False

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


def peak_of(jaxpr: Any, unrolled: int = 1, *, has_blocks: bool = True) -> Counter[str]:
    """Returns the bytes by kind that a program needs at once, without its inputs.

    Args:
        jaxpr: The program.
        unrolled: The turns of a loop that the compiler schedules together: 2 with XLA's double buffering.
        has_blocks: True if activations are what loops over blocks stack; False if they are all that backward reads of
            forward.
    """
    variables = [*jaxpr.constvars, *jaxpr.invars]
    inputs = [Value(stored=True) for _ in variables]
    for value in inputs:
        value.source = value
    operations: list[Operation] = []
    peak = _peak(operations, inputs, _inline(jaxpr, inputs, operations), unrolled, has_blocks)
    copies = [_bytes(variable.aval) for variable, value in zip(variables, inputs, strict=True) if value.copied]
    return peak + Counter(communication=sum(copies))


def _peak(
    operations: list[Operation], inputs: list[Value], results: list[Value], unrolled: int, has_blocks: bool
) -> Counter[str]:
    """Returns the bytes by kind that operations need at once; the bytes of the inputs are of those to overwrite."""
    operations = _join_zeros(operations)
    _find_lifetimes(operations, results)
    if not has_blocks:
        _mark_kept(operations)
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
            during = live + _peak_of_bodies(operation, overwritten, unrolled, has_blocks)
            peak = max(peak, during, key=Counter.total)
        start(operation.writes)
        peak = max(peak, live.copy(), key=Counter.total)
        end([*(value for value in dying if value not in overwritten), *ending.pop(position, [])])
    return peak


def _peak_of_bodies(operation: Operation, overwritten: list[Value], unrolled: int, has_blocks: bool) -> Counter[str]:
    """Returns the bytes while an operation runs its programs: those of the largest, and what it stacks meanwhile."""
    peak: Counter[str] = Counter()
    for jaxpr, first in operation.bodies:
        inputs = [Value(stored=True) for _ in jaxpr.constvars]
        for number, value in enumerate(operation.reads[first:], first):
            counts = number in operation.carried or value in overwritten
            inputs.append(Value(value.bytes if counts else 0, value.kind, stored=True, source=value.source))
        operations: list[Operation] = []
        if operation.name == "scan":
            operations, results = _turns(operation, jaxpr, inputs, min(unrolled, operation.length))
        else:
            results = _inline(jaxpr, inputs, operations)
        peak = max(peak, _peak(operations, inputs, results, unrolled, has_blocks), key=Counter.total)
    for value in operation.stacked:
        peak[value.kind] += value.bytes
    if operation.name == "scan" and operation.length > unrolled > 1:
        for value in operation.reads[operation.carried.stop :]:  # the first turns, peeled, read the stacks as they were
            peak[value.kind] += value.bytes * value.moved
    return peak


def _turns(operation: Operation, jaxpr: Any, inputs: list[Value], turns: int) -> tuple[list[Operation], list[Value]]:
    """Returns the operations of some turns of a loop in the order in which they are scheduled, and what they carry.

    Products that no carried value depends on, and what depends on them, are late: those of the first turn run after all
    turns, which hide their collectives. Slices of stacks are in memory from their first use. What a turn stacks is in
    the stack at once.
    """
    first, last = (each + len(jaxpr.constvars) for each in (operation.carried.start, operation.carried.stop))
    carried = inputs[first:last]
    ordered: list[Operation] = []
    delayed: list[Operation] = []
    unread = set[Value]()
    for turn in range(turns):
        stacks = zip(jaxpr.invars[operation.carried.stop :], inputs[last:], strict=True)
        slices = [Value(_bytes(variable.aval), source=stack.source) for variable, stack in stacks]
        operations: list[Operation] = []
        results = _inline(jaxpr, [*inputs[:first], *carried, *slices], operations)
        carried, stacked = results[: len(carried)], results[len(carried) :]
        for value in carried:
            value.stored = True
        for value, one in zip(operation.stacked, stacked, strict=True):
            value.moved = one.moved
        late = _late(operations, carried) if turn == 0 else ()
        delayed += [each for each in operations if each in late]
        unread.update(slices)
        for each in [*(each for each in operations if each not in late), *(delayed if turn == turns - 1 else ())]:
            found = [value for value in each.reads if value in unread]
            ordered += [Operation("slice", [], found)] * bool(found) + [each]
            unread.difference_update(found)
    return ordered, carried


def _join_zeros(operations: list[Operation]) -> list[Operation]:
    """Moves zeros to the first ones of the same size, with which XLA makes them in one kernel."""
    groups: dict[Any, list[Operation]] = {}
    for each in operations:
        is_constant = each.name == "broadcast_in_dim" and not each.reads[0].bytes
        groups.setdefault(each.writes[0].bytes if is_constant else each, []).append(each)
    return [each for group in groups.values() for each in group]


def _late(operations: list[Operation], carried: list[Value]) -> set[Operation]:
    """Returns the products that no carried value depends on, and the operations that depend on them."""
    needed, made = set(carried), set[Value]()
    needs = set[Operation]()
    for operation in reversed(operations):
        if not needed.isdisjoint(operation.writes):
            needs.add(operation)
            needed.update(operation.reads)
    late = set[Operation]()
    for operation in operations:
        if operation not in needs and (operation.name in PRODUCTS or not made.isdisjoint(operation.reads)):
            late.add(operation)
            made.update(operation.writes)
    return late


def _inline(jaxpr: Any, inputs: Sequence[Value], operations: list[Operation], is_backward: bool = False) -> list[Value]:
    """Appends the operations of a program, and returns its results."""
    values: dict[Any, Value] = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))

    def read(variable: Any) -> Value:
        return Value() if is_literal(variable) else values[variable]

    for equation in jaxpr.eqns:
        name, bodies = equation.primitive.name, inner_programs(equation)
        reads = [read(variable) for variable in equation.invars]
        if len(bodies) == 1 and name not in BODIES:
            constants = [Value(stored=True) for _ in bodies[0].constvars]
            arguments = [*constants, *reads[len(reads) - len(bodies[0].invars) :]]
            results = _inline(bodies[0], arguments, operations, is_backward or _is_backward(equation))
        elif name in SAME:
            results = reads[: len(equation.outvars)]
            operations.append(Operation(name, reads, [], is_backward=is_backward or _is_backward(equation)))
        else:
            kind = "communication" if name in GATHERS else "temporaries"
            moved = _gathers_inside(equation) or (name not in STORED and any(one.moved for one in reads))
            copies = 2 if moved and name in GATHERS else 1
            results = [Value(copies * _bytes(variable.aval), kind, moved=moved) for variable in equation.outvars]
            if name in SLICES:
                results[0].source = reads[SLICES[name]].source
            elif _gathers_inside(equation) and reads[0].source:
                reads[0].source.copied = True
            operations.append(_operation(equation, reads, results, bodies))
            operations[-1].is_backward = is_backward or _is_backward(equation)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _is_backward(equation: Any) -> bool:
    """Returns whether autodiff made an operation by transposing forward."""
    return "transpose(" in str(equation.source_info.name_stack)


def _gathers_inside(equation: Any) -> bool:
    """Returns whether an operation gathers along a dim inside others."""
    before = equation.params["all_gather_dimension"] if equation.primitive.name in GATHERS else 0
    return before > 0 and math.prod(equation.outvars[0].aval.shape[:before]) > 1


def _operation(equation: Any, reads: list[Value], writes: list[Value], bodies: list[Any]) -> Operation:
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        carried = carried_by_scan(equation)
        stacked = writes[len(carried) :]
        return Operation(name, reads, writes, [(bodies[0], 0)], carried, stacked, params["length"])
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
        for value in operation.writes:
            value.last = max(value.last, position)
        for value in operation.stacked:
            value.kind = "activations" if value.last < len(operations) else "gradients"


def _mark_kept(operations: list[Operation]) -> None:
    """Marks as activations what backward reads of forward."""
    for operation in operations:
        if operation.is_backward:
            continue
        for value in operation.writes:
            is_computed = value.kind == "temporaries" and value.source is None
            if is_computed and value.last < len(operations) and operations[value.last].is_backward:
                value.kind = "activations"
