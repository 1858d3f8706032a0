"""A pipeline schedule as a table: the action of each stage at each tick.

                tick  0    1    2    3    4    5    6    7
    stage 0           F0   F1   .    .    B0   W0   B1   W1       F  forward of a microbatch
    stage 1           .    F0   B0   W0   F1   B1   W1   .        B  backward to the input,  W  to the weights

The executor, the drawing, and the calculations of memory and time use only this table. It is checked here before
compilation, so a schedule that would deadlock is an error with a stage and a tick instead of a hang.

The model is cut into S x V *virtual stages*, numbered in the order of the model. Each of the S stages has V of them,
its *chunks*. The placement "loop" assigns virtual stages round-robin (chunk v of stage s is v S + s). The placement "v"
assigns them down the stages and up again (V = 2: s and 2S - 1 - s).

Every action takes one tick: forward, recompute (R: the forward again, for its backward), backward to the input, or
backward to the weights. All stages run one compiled program, and a `ppermute` of all stages ends each tick, so a tick
lasts as long as its slowest action. If a whole backward were one action (twice as long as a forward), a tick with a
forward on one stage and a backward on another would cost 2 for both. 1F1B has both in all ticks except the first and
the last, so it would lose a third. Four actions of about equal length avoid this loss. `measure` (timing.py) uses the
actual length of each tick.

Sources: Huang et al. 2019, "GPipe", section 2.3 (microbatches, bubbles, recomputing); Narayanan et al. 2021, "Efficient
Large-Scale Language Model Training on GPU Clusters", section 2.2 (chunks); Qi et al. 2023, "Zero Bubble Pipeline
Parallelism", section 2 (the two halves of backward); Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"
(the "v").
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import product
from typing import Literal, NamedTuple

from ...mesh.errors import counted, raise_problems

Placement = Literal["loop", "v"]
PLACEMENTS: tuple[Placement, ...] = ("loop", "v")


class Kind(IntEnum):
    """The kind of an action; the numbers are those in the executor's timetable."""

    IDLE = 0
    FORWARD = 1
    RECOMPUTE = 2
    BACKWARD_INPUT = 3
    BACKWARD_WEIGHT = 4


LETTERS = {Kind.FORWARD: "F", Kind.RECOMPUTE: "R", Kind.BACKWARD_INPUT: "B", Kind.BACKWARD_WEIGHT: "W"}
MAX_PROBLEMS = 50
"""The largest number of problems listed in an error."""


class Action(NamedTuple):
    """One tick of one stage.

    Attributes:
        kind: The kind of the action; never IDLE (a schedule has None for an idle tick).
        microbatch: The index of the microbatch, from 0.
        chunk: The index of the stage's virtual stage, from 0.
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
        name: The name of the schedule.
        stages: S, the size of the mesh axis `pipe`.
        microbatches: M, the number of microbatches that the rows of a batch are split into.
        chunks: V, the number of virtual stages on each stage.
        placement: The placement of the virtual stages: "loop" (round-robin) or "v" (down the stages and up again).
        joint: Whether a gradient is passed on only after backward to the weights, as if autodiff computed both halves
            of backward at once.
        by_stage: [stage][tick]; None if the stage is idle. All stages have the same number of ticks.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int = 1
    placement: Placement = "loop"
    joint: bool = False
    by_stage: tuple[tuple[Action | None, ...], ...]

    @property
    def num_ticks(self) -> int:
        """The number of ticks from the first action to the last."""
        return len(self.by_stage[0])

    @property
    def num_virtual_stages(self) -> int:
        """S x V, the number of parts that the model is cut into."""
        return self.stages * self.chunks

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """Returns the index, from 0, of the virtual stage of a stage's chunk."""
        if self.placement == "v" and chunk == 1:
            return 2 * self.stages - 1 - stage
        return chunk * self.stages + stage

    def home(self, virtual_stage: int) -> tuple[int, int]:
        """Returns the stage and the chunk of a virtual stage."""
        chunk, stage = divmod(virtual_stage, self.stages)
        return (self.stages - 1 - stage if self.placement == "v" and chunk == 1 else stage), chunk

    def needs(self, stage: int, action: Action) -> list[tuple[int, Action]]:
        """Returns the actions that must run at an earlier tick, as (stage, action).

        For a backward, they include its recompute, which the caller ignores if the table does not have it.
        """
        kind, microbatch, chunk = action
        here = self.virtual_stage(stage, chunk)
        if kind == Kind.FORWARD:
            return [self._elsewhere(Kind.FORWARD, microbatch, here - 1)] if here > 0 else []
        if kind == Kind.RECOMPUTE:
            return [(stage, Action(Kind.FORWARD, microbatch, chunk))]
        if kind == Kind.BACKWARD_WEIGHT:
            return [(stage, Action(Kind.BACKWARD_INPUT, microbatch, chunk))]
        own = [(stage, Action(forward, microbatch, chunk)) for forward in (Kind.FORWARD, Kind.RECOMPUTE)]
        last = here == self.num_virtual_stages - 1
        gradient = Kind.BACKWARD_WEIGHT if self.joint else Kind.BACKWARD_INPUT
        return own if last else [*own, self._elsewhere(gradient, microbatch, here + 1)]

    def _elsewhere(self, kind: Kind, microbatch: int, virtual_stage: int) -> tuple[int, Action]:
        stage, chunk = self.home(virtual_stage)
        return stage, Action(kind, microbatch, chunk)

    def actions(self) -> Iterator[tuple[int, int, Action]]:
        """Yields (tick, stage, action), tick by tick."""
        for tick, actions in enumerate(zip(*self.by_stage, strict=True)):
            for stage, action in enumerate(actions):
                if action is not None:
                    yield tick, stage, action


Places = dict[tuple[int, Action], int]
"""(stage, action) -> tick."""


def check(schedule: Schedule) -> None:
    """Checks that a schedule can run, and that it has every action of a training step exactly once.

    Raises:
        UserError: The message lists all problems: a number of chunks that is invalid for the placement, missing or
            repeated actions, and actions that do not run after the actions that they need.
    """
    if schedule.placement == "v" and schedule.chunks != 2:
        problems = [f"placement v needs 2 chunks on each stage, got {schedule.chunks}"]
    else:
        when, problems = _placed(schedule)
        problems += [*_missing(schedule, when), *_too_early(schedule, when)]
    raise_problems(problems, f"{counted(len(problems), 'problem')} in schedule {schedule.name}:", MAX_PROBLEMS)


def _placed(schedule: Schedule) -> tuple[Places, list[str]]:
    """Returns the tick of each action, and the repeated actions."""
    when: Places = {}
    problems = []
    for tick, stage, action in schedule.actions():
        first = when.setdefault((stage, action), tick)
        if first != tick:
            problems.append(f"stage {stage}, tick {tick}: {action} is repeated; it already ran at tick {first}")
    return when, problems


def _missing(schedule: Schedule, when: Places) -> list[str]:
    kinds = [kind for kind in LETTERS if kind != Kind.RECOMPUTE]
    wanted = product(range(schedule.stages), range(schedule.microbatches), range(schedule.chunks), kinds)
    actions = ((stage, Action(kind, microbatch, chunk)) for stage, microbatch, chunk, kind in wanted)
    return [f"stage {stage}: {action} is missing" for stage, action in actions if (stage, action) not in when]


def _too_early(schedule: Schedule, when: Places) -> Iterator[str]:
    for (stage, action), tick in when.items():
        for source, need in schedule.needs(stage, action):
            found = when.get((source, need), -1)  # `_missing` reports missing actions
            if found >= tick:
                of = "" if source == stage else f" of stage {source}"
                here = f"stage {stage}, tick {tick}: {action}"
                yield f"{here} needs {need}{of} at an earlier tick, but that is at tick {found}"
