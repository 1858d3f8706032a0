"""A pipeline schedule is a table: which action each stage runs at each tick.

                tick  0    1    2    3    4    5    6    7
    stage 0           F0   F1   .    .    B0   W0   B1   W1       F  forward of a microbatch
    stage 1           .    F0   B0   W0   F1   B1   W1   .        B  backward to the input,  W  to the weights

One table is all that the executor, the drawing, the memory and the time know of a schedule. It is checked here before
anything is compiled, so a schedule that would deadlock is an error with a stage and a tick, not a hang.

The model is cut into S x V *virtual stages*, numbered in the order of the model. Each of S stages has V of them, which
are its *chunks*. Virtual stages go round the stages ("loop": chunk v of stage s is v S + s), or down the stages and up
again ("v", V = 2: s and 2S - 1 - s).

Every action is a tick of its own: forward, recompute (R: the forward again, for its backward), backward to the input,
backward to the weights. All stages run one compiled program, and a `ppermute` of all stages ends each tick, so a tick
lasts as long as its slowest action. Were a whole backward one action (twice a forward), a tick in which one stage runs
a forward and another a backward would cost 2 for both; 1F1B mixes the two in all ticks but the first and the last, and
would lose a third. Four actions of about one length lose nothing. `measure` (timing.py) counts such ticks as they are.

Sources: Huang et al. 2019, "GPipe", section 2.3 (microbatches, bubbles, recomputing); Narayanan et al. 2021, "Efficient
Large-Scale Language Model Training on GPU Clusters", section 2.2 (chunks); Qi et al. 2023, "Zero Bubble Pipeline
Parallelism", section 2 (the two halves of backward); Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"
(the "v").
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
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
        kind: What is computed; never IDLE, for which a schedule has None.
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
        name: What it is called.
        stages: S, the size of the mesh axis `pipe`.
        microbatches: M, into which the rows of a batch are split.
        chunks: V, virtual stages on each stage.
        placement: Where the virtual stages are: round the stages, or down and up again.
        joint: Whether a gradient is passed on only after backward to the weights, as where autodiff makes both halves
            of backward in one go.
        by_stage: [stage][tick], None where the stage is idle; all of one length.
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
        """Ticks from the first action to the last."""
        return len(self.by_stage[0])

    @property
    def num_virtual_stages(self) -> int:
        """S x V, the parts that the model is cut into."""
        return self.stages * self.chunks

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """Returns the virtual stage that a stage's chunk is, from 0."""
        if self.placement == "v" and chunk == 1:
            return 2 * self.stages - 1 - stage
        return chunk * self.stages + stage

    def home(self, virtual_stage: int) -> tuple[int, int]:
        """Returns the stage and the chunk of a virtual stage."""
        chunk, stage = divmod(virtual_stage, self.stages)
        return (self.stages - 1 - stage if self.placement == "v" and chunk == 1 else stage), chunk

    def needs(self, stage: int, action: Action) -> list[tuple[int, Action]]:
        """Returns the actions that must run at an earlier tick, as (stage, action).

        A backward names its recompute too, which counts only where the table has one.
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
    """Checks that a schedule can run and does everything that training needs, once.

    Raises:
        UserError: The message lists all problems: a number of chunks that the placement does not have, actions that are
            missing or repeated, and actions at or before the tick of what they need.
    """
    if schedule.placement == "v" and schedule.chunks != 2:
        problems = [f"placement v goes down the stages and up again, with 2 chunks on each, not {schedule.chunks}"]
    else:
        when, problems = _placed(schedule)
        problems += _missing(schedule, when) + _too_early(schedule, when)
    raise_problems(problems, f"{counted(len(problems), 'problem')} in schedule {schedule.name}:", MAX_PROBLEMS)


def _placed(schedule: Schedule) -> tuple[Places, list[str]]:
    """Returns the tick of each action, and the repeated actions."""
    when: Places = {}
    problems = []
    for tick, stage, action in schedule.actions():
        first = when.setdefault((stage, action), tick)
        if first != tick:
            problems.append(f"stage {stage}, tick {tick}: {action} is there twice; it was run at tick {first}")
    return when, problems


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
            found = when.get((source, need), -1)  # `_missing` reports missing actions
            if found >= tick:
                of = "" if source == stage else f" of stage {source}"
                here = f"stage {stage}, tick {tick}: {action}"
                problems.append(f"{here} needs {need}{of} at an earlier tick, but that is at tick {found}")
    return problems
