"""Simulates a scheduled step on one compute queue and one communication queue of a device.

The host starts kernels and collectives in the program's order. A collective runs beside the kernels between its start
and its done; at the done, the compute queue waits for it. What it waits is exposed communication. Loops are repeated by
their trip counts, and branches count by the share of turns that takes them. The loops over the rows of a mixture's
experts have the number of turns that they expect if all experts are chosen equally often.

Our steps took 0.90 to 1.02 times the simulated time on one GPU (docs/gpu.md). Several GPUs were only compared with
published runs. `kernel_time.py` has the efficiency factors.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from ..mesh.targets import Card, Target
from ..parallel.schedule.timetable import Timetable
from ..parallel.xla.census import KINDS, calls_of, replica_groups
from ..parallel.xla.optional_turns import EXCHANGE, part_of
from .kernel_time import ATTENTION, EFFICIENCY, FREE, GEMM, Efficiency, kernel_work
from .link_time import collective_seconds
from .pipeline_time import pipeline_seconds
from .scheduled_program import Computation, Instruction, Program, parse_program
from .trace import COMPUTE, HOST, NETWORK, Event, Recorder


class Exchange(NamedTuple):
    """One collective of the program.

    Attributes:
        name: The instruction that starts it.
        kind: HLO's name, such as "all-gather".
        source: The operation of JAX that it comes from.
        bytes: Bytes of the whole value, each time: the result of an all-gather, the operand of the others.
        runs: How often a step runs it.
        seconds: Its time in a step.
        exposed: The part of `seconds` during which the compute queue waits.
        kernels: Kernels between its start and its done, the last time that it ran.
        matmuls: Those of them that are matrix products or attention.
        attributes: The rest of its line: its groups, its source line.
    """

    name: str
    kind: str
    source: str
    bytes: int
    runs: float
    seconds: float
    exposed: float
    kernels: int
    matmuls: int
    attributes: str


class Timeline(NamedTuple):
    """What a simulated step takes on one device.

    Attributes:
        step_seconds: From its first kernel to its last.
        compute_seconds: Time in kernels.
        communication_seconds: Time in collectives, hidden or not.
        exposed_seconds: Time during which the compute queue waits for collectives.
        flops: Operations of its matrix products and attention.
        exchanges: Its collectives; those that expose the most time come first.
        parts: The part of a pipeline's tick -> the seconds of each branch: the part and its omission, or the exchanges
            of messages; empty without a pipeline.
    """

    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    flops: float
    exchanges: tuple[Exchange, ...]
    parts: dict[str, list[float]]

    @property
    def exposed_share(self) -> float:
        """The share of the communication that nothing hides."""
        return self.exposed_seconds / self.communication_seconds if self.communication_seconds else 0.0


def simulate(
    compiled_text: str,
    target: Target,
    efficiency: Efficiency = EFFICIENCY,
    recorder: Recorder | None = None,
    timetable: Timetable | None = None,
) -> Timeline:
    """Simulates one step.

    Args:
        compiled_text: `compiled.as_text()` of a step for the target.
        target: The accelerators that it was compiled for.
        efficiency: The shares of their peaks that kernels and collectives reach.
        recorder: Collects the events of the step.
        timetable: The timetable of a pipeline; None without one. Kernels and collectives are those of a stage that
            runs each part of a tick as often as the stage with the most; the time of the step includes the waits of
            all stages for each other.
    """
    program = parse_program(compiled_text)
    blocks = timetable.blocks_per_slot if timetable else 1
    queues = _Queues(program, target, efficiency, recorder or Recorder(), blocks)
    queues.run(program.computations[program.entry])
    totals = queues.totals
    step_seconds = max(queues.compute, queues.communication)
    if timetable:
        runs = round(totals.sums["ticks"] / len(timetable.entries.kind))
        step_seconds += runs * pipeline_seconds(timetable, queues.parts) - totals.sums["parts"]
    exchanges = [
        Exchange(
            name=name,
            kind=_kind(instruction),
            source=instruction.source,
            bytes=queues.sizes[name],
            runs=totals.runs[name],
            seconds=totals.seconds[name],
            exposed=totals.exposed[name],
            kernels=queues.between[name][0],
            matmuls=queues.between[name][1],
            attributes=instruction.attributes,
        )
        for name, instruction in queues.started.items()
    ]
    return Timeline(
        step_seconds=step_seconds,
        compute_seconds=totals.sums["compute"],
        communication_seconds=sum(totals.seconds.values()),
        exposed_seconds=sum(totals.exposed.values()),
        flops=totals.sums["flops"],
        exchanges=tuple(sorted(exchanges, key=lambda each: -each.exposed)),
        parts=queues.parts,
    )


def _zeros() -> defaultdict[str, float]:
    return defaultdict(float)


@dataclass
class _Totals:
    """Sums over a step, which grow in proportion when a loop repeats its body."""

    sums: defaultdict[str, float] = field(default_factory=_zeros)
    runs: defaultdict[str, float] = field(default_factory=_zeros)
    seconds: defaultdict[str, float] = field(default_factory=_zeros)
    exposed: defaultdict[str, float] = field(default_factory=_zeros)

    def copy(self) -> "_Totals":
        return _Totals(*(each.copy() for each in vars(self).values()))

    def add(self, before: "_Totals", after: "_Totals", times: float) -> None:
        """Adds, `times` times, what came between two copies."""
        for mine, old, new in zip(vars(self).values(), vars(before).values(), vars(after).values(), strict=True):
            for key in new:
                mine[key] += (new[key] - old[key]) * times


class _Queues:
    """The state of a simulation: until when each queue is busy, in seconds since the step began."""

    def __init__(
        self, program: Program, target: Target, efficiency: Efficiency, recorder: Recorder, blocks: int
    ) -> None:
        self.program, self.target, self.efficiency, self.recorder = program, target, efficiency, recorder
        self.blocks = blocks
        self.compute = self.communication = 0.0
        self.totals = _Totals()
        self.started: dict[str, Instruction] = {}
        self.sizes: dict[str, int] = {}
        self.ends: dict[str, float] = {}
        self.between: dict[str, tuple[int, int]] = {}
        self.parts: dict[str, list[float]] = {}
        self._kernels = self._matmuls = 0
        self._at_start: dict[str, tuple[int, int]] = {}

    def run(self, computation: Computation) -> None:
        """Runs a computation once."""
        for instruction in computation:
            if instruction.opcode == "while":
                self._loop(instruction)
            elif instruction.opcode == "conditional":
                self._branch(instruction)
            elif instruction.opcode == "call":
                called = self.program.called(instruction, "to_apply")
                if called is not None:
                    self.run(called)
            elif (collective := self._collective(instruction)) is not None:
                self._start(instruction, collective, computation)
                if not instruction.opcode.endswith("-start"):
                    self._done(instruction.name)
            elif instruction.opcode.endswith("-done"):
                if instruction.operands[0] in self.ends:
                    self._done(instruction.operands[0])
            elif instruction.opcode not in FREE:
                self._kernel(instruction, computation)

    def _collective(self, instruction: Instruction) -> Instruction | None:
        """Returns the collective that an instruction starts; it may be inside the computation of an async-start."""
        if instruction.opcode.removesuffix("-start") in KINDS:
            return instruction
        if instruction.opcode == "async-start" and (called := self.program.called(instruction)):
            return next((each for each in called if each.opcode in KINDS), None)
        return None

    def _start(self, instruction: Instruction, collective: Instruction, computation: Computation) -> None:
        kind = _kind(collective)
        groups = replica_groups(collective.attributes, self.target.size)
        operands = sum(each.bytes for each in computation.operands_of(instruction))
        size = operands * max(map(len, groups)) if kind == "all-gather" else operands
        seconds = collective_seconds(kind, size, groups, self.target, self.efficiency)
        name = instruction.name
        self.started[name], self.sizes[name] = collective, size
        begin = max(self.compute, self.communication)
        crosses = any(len({device // self.target.gpus for device in group}) > 1 for group in groups)
        self.recorder.add(Event(NETWORK if crosses else HOST, kind, begin, seconds, collective.source))
        self.communication = begin + seconds
        self.ends[name] = self.communication
        self._at_start[name] = (self._kernels, self._matmuls)
        self.totals.runs[name] += 1
        self.totals.seconds[name] += seconds

    def _done(self, name: str) -> None:
        end = self.ends.pop(name)
        kernels, matmuls = self._at_start[name]
        self.between[name] = (self._kernels - kernels, self._matmuls - matmuls)
        exposed = max(0.0, end - self.compute)
        collective = self.started[name]
        waits = f"waits for {_kind(collective)}"
        self.recorder.add(Event(COMPUTE, waits, self.compute, exposed, collective.source))
        self.totals.exposed[name] += exposed
        self.compute = max(self.compute, end)

    def _kernel(self, instruction: Instruction, computation: Computation) -> None:
        assert isinstance(self.target.card, Card)
        work = kernel_work(instruction, computation, self.program, self.target.card, self.efficiency)
        is_product = bool(GEMM.search(instruction.attributes) or ATTENTION.search(instruction.attributes) or work.flops)
        self._kernels += 1
        self._matmuls += is_product
        seconds = self._shared(work.seconds)
        self.recorder.add(Event(COMPUTE, instruction.name, self.compute, seconds, instruction.source))
        self.compute += seconds
        self.totals.sums["compute"] += seconds
        self.totals.sums["flops"] += work.flops

    def _shared(self, seconds: float) -> float:
        """Returns the time of a kernel that starts now: it is slower while a collective runs beside it."""
        beside = max(0.0, self.communication - self.compute)
        slowed = seconds / self.efficiency.overlapped
        return slowed if slowed <= beside else seconds + beside * (1 - self.efficiency.overlapped)

    def _loop(self, instruction: Instruction) -> None:
        """Runs the body twice, and repeats the second turn, in which the queues are as in every later one."""
        call = next(call for call in calls_of(instruction.attributes) if call.name in instruction.names_in("body"))
        body, turns = self.program.computations[call.name], float(call.times)
        if part := part_of(instruction.attributes):
            self._turns(part, body, turns)
            return
        if turns:
            self.run(body)
        if turns in (0, 1):
            return
        self._catch_up()
        before, compute, communication = self.totals.copy(), self.compute, self.communication
        first = len(self.recorder.events)
        self.run(body)
        self._catch_up()
        if turns < 2:
            del self.recorder.events[first:]
        self.recorder.repeat(first, int(turns) - 2, self.compute - compute)
        self.totals.add(before, self.totals.copy(), turns - 2)
        self.compute += (self.compute - compute) * (turns - 2)
        self.communication += (self.communication - communication) * (turns - 2)

    def _turns(self, part: str, body: Computation, turns: float) -> None:
        """Runs one turn of a part of a tick that is a loop over blocks, and counts it `turns` times."""
        self._catch_up()
        compute, before, first = self.compute, self.totals.copy(), len(self.recorder.events)
        self.run(body)
        self._catch_up()
        seconds, after = self.compute - compute, self.totals
        self.recorder.repeat(first, int(turns) - 1, seconds)
        self.totals = before.copy()
        self.totals.add(before, after, turns)
        self.compute = self.communication = compute + seconds * turns
        self.parts[part] = [0.0, seconds * self.blocks]
        self.totals.sums["parts"] += seconds * turns

    def _catch_up(self) -> None:
        """Sets an idle communication queue to the time of the compute queue: it is ready now, not in the past."""
        self.communication = max(self.communication, self.compute)

    def _branch(self, instruction: Instruction) -> None:
        """Runs each branch by the share of turns that takes it; the longest one if the shares are unknown."""
        branches = [*calls_of(instruction.attributes)]
        shares = [float(branch.times) for branch in branches]
        self._catch_up()
        compute, communication, before = self.compute, self.communication, self.totals
        ends, recorded, first = [], [], len(self.recorder.events)
        for branch in branches:
            self.compute, self.communication, self.totals = compute, communication, before.copy()
            self.run(self.program.computations[branch.name])
            ends.append((self.compute - compute, self.communication - communication, self.totals))
            recorded.append(self.recorder.events[first:])
            del self.recorder.events[first:]
        if all(share == 1 for share in shares):
            longest = max(range(len(ends)), key=lambda index: ends[index][0])
            shares = [float(index == longest) for index in range(len(ends))]
        self.compute = compute + sum(share * end[0] for share, end in zip(shares, ends, strict=True))
        self.communication = communication + sum(share * end[1] for share, end in zip(shares, ends, strict=True))
        chosen = max(range(len(ends)), key=lambda index: (shares[index], ends[index][0]))
        if ends[chosen][0]:
            self.recorder.replace(first, recorded[chosen], compute, (self.compute - compute) / ends[chosen][0])
        self.totals = before.copy()
        for share, (_, _, after) in zip(shares, ends, strict=True):
            self.totals.add(before, after, share)
        if part := part_of(instruction.attributes):
            self.parts[part] = [end[0] for end in ends]
            self.totals.sums["parts"] += self.compute - compute
            self.totals.sums["ticks"] += part == EXCHANGE


def _kind(instruction: Instruction) -> str:
    return instruction.opcode.removesuffix("-start")
