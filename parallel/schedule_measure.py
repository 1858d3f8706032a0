"""What a schedule costs: its time as it is run, its bubble, and the activations that each stage holds at once.

The time of a table is the sum over its ticks of the slowest action in each, because all stages meet in the `ppermute`
that ends a tick. The ideal time lets each stage run its actions in the same order, each as soon as what it needs is
there; the difference between the two is what meeting costs. At equal costs there is none, for any schedule of
schedules.py.

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2 (the share
of bubbles); Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 3 (lifetimes of activations).
"""

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

from .schedule import Action, Kind, Schedule

UNIT_COSTS = (1.0, 1.0, 1.0)


class Timing(NamedTuple):
    """How long a schedule takes, in units of its costs.

    Attributes:
        ticks: Ticks of the table.
        time: Of the table as it is run: each tick lasts as long as its slowest action, and nothing where all idle.
        ideal_time: Of the same order of actions on each stage where each starts as soon as what it needs is there.
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
        costs: Of a whole stage's forward, backward to the input and backward to the weights; a chunk costs 1 / V of
            each, and recomputing costs a forward. What moves between stages costs nothing.

    Returns:
        Its ticks, times and bubble.

    Raises:
        ValueError: The costs are not three positive numbers.
    """
    if len(costs) != 3 or not all(isfinite(cost) and cost > 0 for cost in costs):
        given = ", ".join(map(str, costs))
        raise ValueError(f"costs {given} are not three positive numbers: forward, backward to input, to weights.")
    forward, backward_input, backward_weight = costs
    cost = {
        Kind.FORWARD: forward,
        Kind.RECOMPUTE: forward,
        Kind.BACKWARD_INPUT: backward_input,
        Kind.BACKWARD_WEIGHT: backward_weight,
    }
    slowest: list[float] = [0] * schedule.num_ticks
    free: list[float] = [0] * schedule.stages  # when each stage has done what it was given so far
    done: dict[tuple[int, Action], float] = {}
    busy = 0.0
    for tick, stage, action in schedule.actions():  # in the order of ticks, so what an action needs is done before it
        length = cost[action.kind]
        start = max([free[stage], *(done.get(need, 0) for need in schedule.needs(stage, action))])
        free[stage] = done[stage, action] = start + length
        slowest[tick] = max(slowest[tick], length)
        busy += length
    time = sum(slowest)
    bubble = 1 - busy / (schedule.stages * time)
    return Timing(schedule.num_ticks, time / schedule.chunks, max(free) / schedule.chunks, bubble)


def peak_activations(schedule: Schedule) -> list[int | float]:
    """Counts the most microbatches whose activations each stage holds at once.

    Those of one chunk count 1 / V. They live from the forward's tick to the end of the backward to the weights; where a
    forward is computed again they live from there, and only the chunk's input is kept before (`peak_inputs`).

    Returns:
        One number per stage.
    """
    return [_peak(schedule, row, recomputed=False) for row in schedule.rows]


def peak_inputs(schedule: Schedule) -> list[int | float]:
    """Counts the most microbatches of which each stage holds no more than its input, to compute its forward again.

    Returns:
        One number per stage, those of one chunk counting 1 / V; 0 where nothing is recomputed.
    """
    return [_peak(schedule, row, recomputed=True) for row in schedule.rows]


def _peak(schedule: Schedule, row: Sequence[Action | None], *, recomputed: bool) -> int | float:
    actions = [action for action in row if action is not None]
    again = {action[1:] for action in actions if action.kind == Kind.RECOMPUTE}
    live = most = 0
    for action in actions:
        first = Kind.RECOMPUTE if action[1:] in again and not recomputed else Kind.FORWARD
        last = Kind.RECOMPUTE if recomputed else Kind.BACKWARD_WEIGHT
        if recomputed and action[1:] not in again:
            continue
        live += action.kind == first
        most = max(most, live)  # before the end: they are still there in the tick of the last
        live -= action.kind == last
    return most // schedule.chunks if most % schedule.chunks == 0 else most / schedule.chunks
