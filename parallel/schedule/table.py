"""A pipeline schedule is a table: which action each stage runs at each tick.

                tick  0    1    2    3    4    5    6    7
    stage 0           F0   F1   .    .    B0   W0   B1   W1       F  forward of a microbatch
    stage 1           .    F0   B0   W0   F1   B1   W1   .        B  backward to the input,  W  to the weights

One table is all that the executor, the drawing, the memory and the time know of a schedule. It is checked here before
anything is compiled, so a schedule that would wait for ever is an error with a stage and a tick in it, not a hang.

The model is cut into S x V pieces, V to each of S stages; a piece's place in the model is its *position*, and its place
on its stage its *chunk*. Positions go round the stages ("loop": v S + s) or down and up again ("v", V = 2: s, 2S-1-s).

Every action is a tick of its own: forward, recomputing a forward (R), backward to the input, backward to the weights.
All stages run one compiled program, whose every tick ends in a `ppermute` of all stages: a tick therefore lasts as long
as its slowest action. Were a whole backward one action (twice a forward), each tick in which one stage runs a forward
and another a backward would cost 2 for both; 1F1B mixes the two in all ticks but the first and the last, and would lose
a third. Four actions of about one length lose nothing. `measure` (schedule_measure.py) counts such ticks as they are.

Sources: Huang et al. 2019, "GPipe", section 2.3 (microbatches, bubbles, recomputing); Narayanan et al. 2021, "Efficient
Large-Scale Language Model Training on GPU Clusters", section 2.2 (chunks); Qi et al. 2023, "Zero Bubble Pipeline
Parallelism", section 2 (the two halves of backward); Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"
(the "v").
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

from ...mesh.errors import UserError

Placement = Literal["loop", "v"]
PLACEMENTS: tuple[Placement, ...] = ("loop", "v")


class Kind(IntEnum):
    """What a stage does in a tick; the numbers are those of the executor's timetable."""

    IDLE = 0
    FORWARD = 1
    RECOMPUTE = 2
    BACKWARD_INPUT = 3
    BACKWARD_WEIGHT = 4


LETTERS = {Kind.FORWARD: "F", Kind.RECOMPUTE: "R", Kind.BACKWARD_INPUT: "B", Kind.BACKWARD_WEIGHT: "W"}
MOST_PROBLEMS = 50
"""Problems of one table that an error lists; it counts the others."""


class Action(NamedTuple):
    """One tick of one stage.

    Attributes:
        kind: What is computed; never IDLE, which is None in a schedule's rows.
        microbatch: Of which microbatch, from 0.
        chunk: Through which of the stage's V pieces of the model, from 0.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{LETTERS.get(self.kind, self.kind)}{self.microbatch}{chunk}"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A table of stages x ticks.

    Attributes:
        name: What it is called.
        stages: S, the size of the mesh axis `pipe`.
        microbatches: M, into which the rows of a batch are split.
        chunks: V, pieces of the model on each stage.
        placement: Where the pieces are: round the stages, or down and up again.
        joint: Whether the two halves of backward are one to the outside: the stage before gets the gradient after the
            second, as where autodiff makes both in one go.
        rows: [stage][tick], None where the stage is idle; all of one length.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int = 1
    placement: Placement = "loop"
    joint: bool = False
    rows: tuple[tuple[Action | None, ...], ...]

    @property
    def num_ticks(self) -> int:
        """Ticks from the first action to the last."""
        return max(map(len, self.rows), default=0)

    @property
    def num_positions(self) -> int:
        """S x V, the pieces that the model is cut into."""
        return self.stages * self.chunks

    def position(self, stage: int, chunk: int) -> int:
        """Returns the place in the model of a stage's chunk, from 0."""
        if self.placement == "v" and chunk == 1:
            return 2 * self.stages - 1 - stage
        return chunk * self.stages + stage

    def home(self, position: int) -> tuple[int, int]:
        """Returns the stage and the chunk of a place in the model."""
        chunk, stage = divmod(position, self.stages)
        return (self.stages - 1 - stage if self.placement == "v" and chunk == 1 else stage), chunk

    def needs(self, stage: int, action: Action) -> list[tuple[int, Action]]:
        """Returns what has to be done at an earlier tick, as (stage, action).

        A backward names its recomputing too, which counts only where the table has one.
        """
        kind, microbatch, chunk = action
        position = self.position(stage, chunk)
        if kind == Kind.FORWARD:
            return [self._elsewhere(Kind.FORWARD, microbatch, position - 1)] if position > 0 else []
        if kind == Kind.RECOMPUTE:
            return [(stage, Action(Kind.FORWARD, microbatch, chunk))]
        if kind == Kind.BACKWARD_WEIGHT:
            return [(stage, Action(Kind.BACKWARD_INPUT, microbatch, chunk))]
        own = [(stage, Action(forward, microbatch, chunk)) for forward in (Kind.FORWARD, Kind.RECOMPUTE)]
        last = position == self.num_positions - 1
        gradient = Kind.BACKWARD_WEIGHT if self.joint else Kind.BACKWARD_INPUT
        return own if last else [*own, self._elsewhere(gradient, microbatch, position + 1)]

    def _elsewhere(self, kind: Kind, microbatch: int, position: int) -> tuple[int, Action]:
        stage, chunk = self.home(position)
        return stage, Action(kind, microbatch, chunk)

    def actions(self) -> Iterator[tuple[int, int, Action]]:
        """Yields (tick, stage, action), tick by tick."""
        for tick in range(self.num_ticks):
            for stage, row in enumerate(self.rows):
                action = row[tick] if tick < len(row) else None
                if action is not None:
                    yield tick, stage, action


def check(schedule: Schedule) -> None:
    """Makes sure that a schedule can run and does all that training needs, once.

    Raises:
        UserError: It lists all that is wrong: rows of unequal length, numbers out of range, actions that are missing
            or there twice, and actions at or before the tick of what they need.
    """
    problems = _misshapen(schedule)
    if not problems:
        when, problems = _placed(schedule)
        problems += _missing(schedule, when) + _too_early(schedule, when)
    if problems:
        left_out = len(problems) - MOST_PROBLEMS
        lines = [*problems[:MOST_PROBLEMS], *([f"... and {left_out} more"] if left_out > 0 else [])]
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise UserError(f"{count} in schedule {schedule.name}:\n" + "\n".join(f"  {line}" for line in lines))


def _misshapen(schedule: Schedule) -> list[str]:
    """What keeps the table from being read at all."""
    problems = [
        f"{name}={size}, but a schedule has at least 1"
        for name, size in zip(
            ("stages", "microbatches", "chunks"),
            (schedule.stages, schedule.microbatches, schedule.chunks),
            strict=True,
        )
        if size < 1
    ]
    if len(schedule.rows) != schedule.stages:
        problems.append(f"{len(schedule.rows)} rows for {schedule.stages} stages; give one row per stage")
    if schedule.placement not in PLACEMENTS:
        problems.append(f"placement {schedule.placement!r} is unknown; give {' or '.join(PLACEMENTS)}")
    if schedule.placement == "v" and schedule.chunks != 2:
        problems.append(f"placement v goes down the stages and up again, with 2 chunks on each, not {schedule.chunks}")
    lengths = [len(row) for row in schedule.rows]
    problems += [
        f"stage {stage}: {length} ticks, but others have {max(lengths)}; fill up with None"
        for stage, length in enumerate(lengths)
        if length != max(lengths)
    ]
    return problems


Places = dict[tuple[int, Action], int]
"""(stage, action) -> tick."""


def _placed(schedule: Schedule) -> tuple[Places, list[str]]:
    """Where each action is, and which should not be there."""
    when: Places = {}
    problems = []
    for tick, stage, action in schedule.actions():
        here = f"stage {stage}, tick {tick}: {action}"
        if action.kind not in LETTERS:
            problems.append(f"{here} is no action; None stands for an idle tick")
        elif not 0 <= action.microbatch < schedule.microbatches:
            problems.append(f"{here} is of microbatch {action.microbatch}, but they are {_span(schedule.microbatches)}")
        elif not 0 <= action.chunk < schedule.chunks:
            problems.append(f"{here} is of chunk {action.chunk}, but they are {_span(schedule.chunks)}")
        elif (stage, action) in when:
            problems.append(f"{here} is there twice; it was run at tick {when[stage, action]}")
        else:
            when[stage, action] = tick
    return when, problems


def _span(count: int) -> str:
    return f"0 to {count - 1}" if count > 1 else "0 alone"


def _missing(schedule: Schedule, when: Places) -> list[str]:
    problems = []
    for stage in range(schedule.stages):
        wanted = (
            Action(kind, microbatch, chunk)
            for microbatch in range(schedule.microbatches)
            for chunk in range(schedule.chunks)
            for kind in LETTERS
            if kind != Kind.RECOMPUTE
        )
        problems += [f"stage {stage}: {action} is missing" for action in wanted if (stage, action) not in when]
    return problems


def _too_early(schedule: Schedule, when: Places) -> list[str]:
    problems = []
    for (stage, action), tick in when.items():
        for source, need in schedule.needs(stage, action):
            found = when.get((source, need), -1)  # what is missing is told once, by `_missing`
            if found >= tick:
                of = "" if source == stage else f" of stage {source}"
                here = f"stage {stage}, tick {tick}: {action}"
                problems.append(f"{here} needs {need}{of} at an earlier tick, but that is at tick {found}")
    return problems
