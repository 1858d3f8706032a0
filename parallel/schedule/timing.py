"""The costs of a schedule: its time, its bubble, and the activations that each stage holds at once.

The time of a table is the sum over its ticks of the slowest action in each, because all stages meet in the `ppermute`
that ends a tick. The ideal time lets each stage run its actions in the same order, each as soon as what it needs is
there; the difference between the two is what meeting costs. At equal costs there is none, for any schedule of
builders.py.

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2 (the share
of bubbles); Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (lifetimes of activations).
"""

from collections.abc import Sequence
from itertools import accumulate
from math import isfinite
from typing import NamedTuple

from ...mesh.errors import UserError
from .schedule_table import Action, Kind, Schedule

UNIT_COSTS = (1.0, 1.0, 1.0)


class Timing(NamedTuple):
    """The duration of a schedule, in units of its costs.

    Attributes:
        ticks: Ticks of the table.
        time: The duration of the table: each tick lasts as long as its slowest action, and 0 if all stages are idle.
        ideal_time: The duration if each action starts as soon as its inputs are available.
        bubble: The share of `time` in which a stage is idle, over all stages, from 0 to 1.
    """

    ticks: int
    time: float
    ideal_time: float
    bubble: float


def measure(schedule: Schedule, costs: Sequence[float] = UNIT_COSTS) -> Timing:
    """Times a schedule.

    Args:
        schedule: One that `check` accepts.
        costs: The costs of a stage's forward, backward to the input and backward to the weights; a chunk costs 1 / V of
            each, and a recompute costs a forward (less, where a chunk is one block). What moves costs nothing.

    Returns:
        Its ticks, times and bubble.

    Raises:
        UserError: The costs are not three positive numbers.
    """
    length = _of_a_stage(costs)  # divided by V once, at the end, so that nothing is rounded before
    slowest: list[float] = [0] * schedule.num_ticks
    free: list[float] = [0] * schedule.stages  # when each stage has done what it was given so far
    done: dict[tuple[int, Action], float] = {}
    busy = 0.0
    for tick, stage, action in schedule.actions():  # tick by tick, so what an action needs is done before it
        lasts = length[action.kind]
        start = max([free[stage], *(done.get(need, 0) for need in schedule.needs(stage, action))])
        free[stage] = done[stage, action] = start + lasts
        slowest[tick] = max(slowest[tick], lasts)
        busy += lasts
    time = sum(slowest)
    bubble = 1 - busy / (schedule.stages * time)
    return Timing(schedule.num_ticks, time / schedule.chunks, max(free) / schedule.chunks, bubble)


def action_lengths(schedule: Schedule, costs: Sequence[float] = UNIT_COSTS) -> dict[Kind, float]:
    """Returns how long each kind of action takes on one chunk; see `measure`."""
    return {kind: cost / schedule.chunks for kind, cost in _of_a_stage(costs).items()}


def tick_lengths(schedule: Schedule, costs: Sequence[float] = UNIT_COSTS) -> list[float]:
    """Returns how long each tick lasts: as long as its slowest action."""
    length = action_lengths(schedule, costs)
    slowest: list[float] = [0] * schedule.num_ticks
    for tick, _, action in schedule.actions():
        slowest[tick] = max(slowest[tick], length[action.kind])
    return slowest


def _of_a_stage(costs: Sequence[float]) -> dict[Kind, float]:
    if len(costs) != 3 or not all(isfinite(cost) and cost > 0 for cost in costs):
        given = ",".join(f"{cost:g}" for cost in costs)
        raise UserError(
            f"costs {given} are not three positive numbers. Give those of forward, backward to the input and backward "
            "to the weights, such as 1,1.2,0.9."
        )
    forward, backward_input, backward_weight = costs
    return {
        Kind.FORWARD: forward,
        Kind.RECOMPUTE: forward,
        Kind.BACKWARD_INPUT: backward_input,
        Kind.BACKWARD_WEIGHT: backward_weight,
    }


def live_activations(schedule: Schedule, stage: int) -> list[int]:
    """Counts the activations that a stage holds in each tick, in microbatches of one chunk.

    They live from the forward's tick to the end of the backward to the weights; where a forward is recomputed they live
    from the recompute, and the stage holds only the chunk's input before.
    """
    actions, recomputed = schedule.by_stage[stage], _recomputed(schedule, stage)
    starts = [
        action is not None and action.kind == (Kind.RECOMPUTE if action[1:] in recomputed else Kind.FORWARD)
        for action in actions
    ]
    ends = [action is not None and action.kind == Kind.BACKWARD_WEIGHT for action in actions]
    return _held(starts, ends)


def live_inputs(schedule: Schedule, stage: int) -> list[int]:
    """Counts the inputs that a stage holds in each tick to recompute forwards, in microbatches of one chunk."""
    actions, recomputed = schedule.by_stage[stage], _recomputed(schedule, stage)
    starts = [action is not None and action.kind == Kind.FORWARD and action[1:] in recomputed for action in actions]
    ends = [action is not None and action.kind == Kind.RECOMPUTE for action in actions]
    return _held(starts, ends)


def peak_activations(schedule: Schedule) -> list[int | float]:
    """Returns the most microbatches whose activations each stage holds at once; those of one chunk count 1 / V."""
    return [_whole(max(live_activations(schedule, stage)), schedule.chunks) for stage in range(schedule.stages)]


def peak_inputs(schedule: Schedule) -> list[int | float]:
    """Returns the most microbatches of which each stage holds the input alone; 0 where nothing is recomputed."""
    return [_whole(max(live_inputs(schedule, stage)), schedule.chunks) for stage in range(schedule.stages)]


def _recomputed(schedule: Schedule, stage: int) -> set[tuple[int, int]]:
    recomputes = (each for each in schedule.by_stage[stage] if each is not None and each.kind == Kind.RECOMPUTE)
    return {(action.microbatch, action.chunk) for action in recomputes}


def _held(starts: Sequence[bool], ends: Sequence[bool]) -> list[int]:
    """Counts what has started and not ended; what ends in a tick is still there in it."""
    started, ended = accumulate(starts), accumulate(ends, initial=0)
    return [a - b for a, b in zip(started, ended, strict=False)]


def _whole(count: int, chunks: int) -> int | float:
    return count // chunks if count % chunks == 0 else count / chunks
