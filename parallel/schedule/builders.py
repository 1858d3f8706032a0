"""The schedules: each defines the order of actions on a stage; every action runs at the earliest possible tick.

S stages, M microbatches, V chunks on each stage, G the largest number of microbatches in a group (S if S divides M).
With unit costs, for every M >= S:

    name               time                                     peak activations of stage s, in microbatches
    gpipe              3 (M + S - 1)                            M
    1f1b               3 (M + S - 1)                            S - s
    interleaved_1f1b   3 (M + (S - 1) / V)                      ((V - 1) G + S - s) / V; for G = S it is S - s / V
    zb_h1              3 M + S - 1                              S
    zbv                3 M + max((S - 1) / 2, 2 S - 1 - M)      S, or less if M < 2 S - 1

All except the last follow one pattern: a stage runs some forwards to warm up, then alternates forwards and backwards,
then runs the remaining backwards. GPipe warms up with all forwards, 1F1B with one for each later stage. In ZB-H1,
stage s delays the second half of each backward until s other backwards have run, which fills the ticks that would be
idle at the end. The last schedule is the "v": the first and the last virtual stage of the model are on the same stage,
so gradients start where activations started.

Recomputation adds a forward before each backward. It does not wait for the gradient, so it adds M to each time and no
idle ticks. Activations then live from the recomputed forward on; before it, a stage holds only its input.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from ...mesh.errors import UserError, raise_problems, unknown_name
from .csv_file import read_schedule
from .schedule_table import Action, Kind, Placement, Schedule

Order = list[Action]
"""The actions of one stage in order, without idle ticks."""

F, R, B, W = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def gpipe(stage: int, stages: int, microbatches: int, chunks: int) -> Order:
    """Orders all forwards before all backwards.

    Source: Huang et al. 2019, "GPipe: Easy Scaling with Micro-Batch Pipeline Parallelism", section 2.2.
    """
    return _in_turn([microbatches], chunks, warmup=microbatches * chunks)


def one_forward_one_backward(stage: int, stages: int, microbatches: int, chunks: int) -> Order:
    """Alternates forwards and backwards: a stage holds at most one activation per remaining stage.

    With several chunks it is interleaved: a group of microbatches passes through chunk 0, then through chunk 1, and so
    on. Filling and draining the pipeline then take 1/V of the time. A group has at least S microbatches, so that its
    first microbatch has returned from the last stage when its last one has left. Groups are as equal as possible, so
    that no time is lost if S does not divide M.

    Megatron-LM warms up with 2 (S - 1 - s) forwards, this schedule with S - 1 - s. The additional forwards hide the
    time of sending. Here a tick includes that time, so additional activations would not help.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2.
    """
    groups = microbatches // stages
    sizes = [microbatches // groups + (group < microbatches % groups) for group in range(groups)]
    return _in_turn(sizes, chunks, warmup=(chunks - 1) * max(sizes) + stages - 1 - stage)


def zero_bubble_h1(stage: int, stages: int, microbatches: int, chunks: int) -> Order:
    """Orders 1F1B with weight gradients delayed by s microbatches on stage s, so that other gradients do not wait.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.1 (ZB-H1).
    """
    return _in_turn([microbatches], chunks, warmup=stages - 1 - stage, late=stage)


def zero_bubble_v(stage: int, stages: int, microbatches: int, chunks: int) -> Order:
    """Orders two chunks on each stage: chunk 0 for the pass down the stages, chunk 1 for the pass back up.

    A stage runs forwards of chunk 0 until the first microbatch arrives on the way up. It then runs all actions of one
    microbatch on one chunk, then all of one on the other. Near the end, backwards to the input take precedence, and
    backwards to the weights fill the remaining ticks.

    The order is made for at least 2 S - 1 microbatches; if there are fewer, the excess ones are left out.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (ZB-V); Qi et al. 2024, "Pipeline Parallelism with
    Controllable Memory" (V-ZB).
    """
    (f0, b0, w0), (f1, b1, w1) = ([(kind, chunk) for kind in (F, B, W)] for chunk in range(chunks))
    total = max(microbatches, 2 * stages - 1)
    to_turn = stages - stage  # stages from here to the turn of the v, this one included
    steps = [
        *[f0] * (2 * to_turn - 1),
        *[f1, f0] * stage,
        *[f1, b1, w1] * to_turn,
        *[f0, b0, w0, f1, b1, w1] * (total - stages - to_turn + 1),
        *[b0, w0, f1, b1, w1] * (to_turn - 1),
        *[b0, b1] * stage,
        *[b0, w0] * to_turn,
        *[w1] * stage,
        *[w0] * stage,
    ]
    numbers = {step: itertools.count() for step in steps}  # each step's microbatches come in order
    order = [Action(kind, next(numbers[kind, chunk]), chunk) for kind, chunk in steps]
    return [action for action in order if action.microbatch < microbatches]


def _in_turn(sizes: Sequence[int], chunks: int, *, warmup: int, late: int = 0) -> Order:
    """Orders some forwards, then alternates forwards and backwards, then the remaining backwards.

    Args:
        sizes: The number of microbatches in each group; a group passes all chunks before the next group starts.
        chunks: V, the number of chunks.
        warmup: The number of forwards before the first one that is followed by a backward.
        late: The number of backwards to the input between that of a microbatch and its backward to the weights.
    """
    forwards = _in_groups(F, sizes, range(chunks))
    inputs = _in_groups(B, sizes, range(chunks)[::-1])
    weights = _in_groups(W, sizes, range(chunks)[::-1])
    order = forwards[:warmup]
    for i in range(len(inputs) + late):
        order += forwards[warmup + i : warmup + i + 1]
        order += inputs[i : i + 1]
        order += weights[i - late : i - late + 1] if i >= late else []
    return order


def _in_groups(kind: Kind, sizes: Sequence[int], chunks: Sequence[int]) -> Order:
    order: Order = []
    start = 0
    for size in sizes:
        group = range(start, start + size)
        order += [Action(kind, microbatch, chunk) for chunk in chunks for microbatch in group]
        start += size
    return order


class Recipe(NamedTuple):
    """The recipe for the table of a schedule.

    Attributes:
        order: (stage, stages, microbatches, chunks) -> the actions of this stage in order.
        chunks: The default V.
        chunks_vary: Whether V can be changed.
        placement: The placement of the virtual stages.
        joint: Whether both halves of a backward run before the gradient is passed on.
    """

    order: Callable[[int, int, int, int], Order]
    chunks: int = 1
    chunks_vary: bool = False
    placement: Placement = "loop"
    joint: bool = True


SCHEDULES: dict[str, Recipe] = {
    "gpipe": Recipe(gpipe),
    "1f1b": Recipe(one_forward_one_backward),
    "interleaved_1f1b": Recipe(one_forward_one_backward, chunks=2, chunks_vary=True),
    "zb_h1": Recipe(zero_bubble_h1, joint=False),
    "zbv": Recipe(zero_bubble_v, chunks=2, placement="v", joint=False),
}


def make_schedule(
    name: str, stages: int, microbatches: int, *, virtual: int | None = None, recompute: bool = False
) -> Schedule:
    """Makes the table of a schedule.

    Args:
        name: One of SCHEDULES, or the path of a CSV file of your own.
        stages: S, the size of the mesh axis `pipe`.
        microbatches: M, at least S.
        virtual: V, the number of chunks on each stage; None = the schedule's default (2 in `interleaved_1f1b` and
            `zbv`, otherwise 1).
        recompute: Whether each backward recomputes its forward, so that a stage holds only inputs between the two.

    Returns:
        A table that passes `check`.

    Raises:
        UserError: The name is unknown, or the sizes are invalid for the schedule or do not fit each other.
    """
    if name.endswith(".csv"):
        if recompute:
            raise UserError(f"{name} lists recomputed forwards itself: add R0, R1, ... to it, and remove recompute.")
        return read_schedule(name, stages=stages, microbatches=microbatches, virtual=virtual)
    if name not in SCHEDULES:
        raise UserError(unknown_name("schedule", name, SCHEDULES) + " A file of your own ends in .csv.")
    recipe = SCHEDULES[name]
    chunks = recipe.chunks if virtual is None else virtual
    raise_problems(_unfit(name, recipe, stages, microbatches, chunks))
    orders = [recipe.order(stage, stages, microbatches, chunks) for stage in range(stages)]
    if recompute:
        orders = [_recomputed(order) for order in orders]
    empty = Schedule(
        name=name,
        stages=stages,
        microbatches=microbatches,
        chunks=chunks,
        placement=recipe.placement,
        joint=recipe.joint,
        by_stage=((),) * stages,
    )
    return _place(empty, orders)


def _unfit(name: str, recipe: Recipe, stages: int, microbatches: int, chunks: int) -> Iterator[str]:
    if min(stages, microbatches, chunks) < 1:
        given = f"size={stages}, microbatches={microbatches} and virtual={chunks}"
        yield f"strategy.pipe: {given} must be at least 1 each."
    elif few := too_few_microbatches(stages, microbatches):
        yield few
    if chunks != recipe.chunks and not recipe.chunks_vary:
        several = [other for other, each in SCHEDULES.items() if each.chunks_vary]
        yield (
            f"{name} has {recipe.chunks} chunk{'s'[: recipe.chunks > 1]} on each stage, not {chunks}. Leave "
            f"strategy.pipe.virtual out, or take {' or '.join(several)}."
        )


def too_few_microbatches(stages: int, microbatches: int) -> str:
    """Returns the error message for too few microbatches, or ""."""
    if microbatches >= stages:
        return ""
    lower = f", or strategy.pipe.size to {microbatches} or less" if microbatches > 0 else ""
    return (
        f"strategy.pipe.microbatches={microbatches} is fewer than strategy.pipe.size={stages}: {microbatches} < "
        f"{stages}, so not all stages could ever work at once. Set strategy.pipe.microbatches to {stages} or more"
        f"{lower}."
    )


def _recomputed(order: Order) -> Order:
    """Inserts a recomputed forward before each backward."""
    return [each for action in order for each in ((action._replace(kind=R), action) if action.kind == B else (action,))]


def _place(empty: Schedule, orders: Sequence[Order]) -> Schedule:
    """Places every action at the earliest tick at which its stage is free and its inputs are complete."""
    when: dict[tuple[int, Action], float] = {
        (stage, action): inf for stage, order in enumerate(orders) for action in order
    }
    by_stage: list[list[Action | None]] = [[] for _ in orders]
    upcoming = [iter(order) for order in orders]
    heads = [next(actions, None) for actions in upcoming]
    tick = 0
    while any(heads):
        for stage, action in enumerate(heads):
            ready = action is not None and all(when.get(need, -1) < tick for need in empty.needs(stage, action))
            by_stage[stage].append(action if ready else None)
            if action is not None and ready:
                when[stage, action] = tick
                heads[stage] = next(upcoming[stage], None)
        assert any(actions[tick] for actions in by_stage), f"{empty.name} deadlocks"
        tick += 1
    return replace(empty, by_stage=tuple(map(tuple, by_stage)))


def forwards_only(schedule: Schedule, microbatches: int) -> Schedule:
    """Returns a schedule of forwards for evaluation, in the order in which each stage trains.

    Args:
        schedule: The stages, chunks and placement to keep.
        microbatches: M, at most those of the schedule.
    """
    orders = [
        [action for action in own if action and action.kind == Kind.FORWARD and action.microbatch < microbatches]
        for own in schedule.by_stage
    ]
    empty = replace(schedule, name=f"forwards of {schedule.name}", microbatches=microbatches, by_stage=())
    return _place(empty, orders)
