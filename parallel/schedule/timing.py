"""The costs of a schedule: its time, its bubble, and the activations that each stage holds at once.

The time of a table is the sum over its ticks of the slowest action in each, because the `ppermute` that ends a tick
synchronizes all stages. For the ideal time, each stage runs its actions in the same order, each as soon as its inputs
are available. The difference between the two is the cost of synchronization. With equal costs it is zero for every
schedule of builders.py.

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2 (the share
of bubbles); Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (lifetimes of activations).
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import isfinite
from typing import Any, NamedTuple

from ...mesh.errors import UserError
from .schedule_table import Action, Kind, Schedule

UNIT_COSTS = (1.0, 1.0, 1.0)


class Timing(NamedTuple):
    """The duration of a schedule, in units of its costs.

    Attributes:
        ticks: The number of ticks in the table.
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
        schedule: A schedule that passes `check`.
        costs: The costs of a stage's forward, backward to the input and backward to the weights; a chunk costs 1 / V of
            each. A recompute costs as much as a forward, or less if a chunk is one block. Transfers cost nothing.

    Returns:
        The number of ticks, the times and the bubble.

    Raises:
        UserError: The costs are not three positive numbers.
    """
    length = _action_costs(costs)  # divided by V once, at the end, to avoid rounding
    slowest: list[float] = [0] * schedule.num_ticks
    free: list[float] = [0] * schedule.stages  # the time at which each stage has finished its actions so far
    done: dict[tuple[int, Action], float] = {}
    busy = 0.0
    for tick, stage, action in schedule.actions():  # in the order of ticks: the inputs of an action come first
        lasts = length[action.kind]
        start = max([free[stage], *(done.get(need, 0) for need in schedule.needs(stage, action))])
        free[stage] = done[stage, action] = start + lasts
        slowest[tick] = max(slowest[tick], lasts)
        busy += lasts
    time = sum(slowest)
    bubble = 1 - busy / (schedule.stages * time)
    return Timing(schedule.num_ticks, time / schedule.chunks, max(free) / schedule.chunks, bubble)


def action_lengths(schedule: Schedule, costs: Sequence[float] = UNIT_COSTS) -> dict[Kind, float]:
    """Returns the length of each kind of action on one chunk; see `measure`."""
    return {kind: cost / schedule.chunks for kind, cost in _action_costs(costs).items()}


def tick_lengths(schedule: Schedule, costs: Sequence[float] = UNIT_COSTS) -> list[float]:
    """Returns the length of each tick, which is that of its slowest action."""
    length = action_lengths(schedule, costs)
    slowest: list[float] = [0] * schedule.num_ticks
    for tick, _, action in schedule.actions():
        slowest[tick] = max(slowest[tick], length[action.kind])
    return slowest


def _action_costs(costs: Sequence[float]) -> dict[Kind, float]:
    if len(costs) != 3 or not all(isfinite(cost) and cost > 0 for cost in costs):
        given = ",".join(f"{cost:g}" for cost in costs)
        raise UserError(
            f"costs must be three positive numbers, got {given}. Give those of forward, backward to the input and "
            "backward to the weights, such as 1,1.2,0.9."
        )
    kinds = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
    return {**dict(zip(kinds, costs, strict=True)), Kind.RECOMPUTE: costs[0]}


def live_activations(schedule: Schedule, stage: int) -> list[int]:
    """Counts the activations that a stage holds in each tick, in microbatches of one chunk.

    They live from the tick of the forward to the end of the backward to the weights. If a forward is recomputed, they
    live from the recompute; before it, the stage holds only the chunk's input.
    """
    recomputed = _recomputed(schedule, stage)

    def starts(action: Action) -> bool:
        return action.kind == (Kind.RECOMPUTE if action[1:] in recomputed else Kind.FORWARD)

    return _held(schedule.by_stage[stage], starts, Kind.BACKWARD_WEIGHT)


def live_inputs(schedule: Schedule, stage: int) -> list[int]:
    """Counts the inputs that a stage holds in each tick to recompute forwards, in microbatches of one chunk."""
    recomputed = _recomputed(schedule, stage)

    def starts(action: Action) -> bool:
        return action.kind == Kind.FORWARD and action[1:] in recomputed

    return _held(schedule.by_stage[stage], starts, Kind.RECOMPUTE)


def peak_activations(schedule: Schedule) -> list[int | float]:
    """Returns the peak number of microbatches with activations on each stage; those of one chunk count 1 / V."""
    return [_whole(max(live_activations(schedule, stage)), schedule.chunks) for stage in range(schedule.stages)]


def peak_inputs(schedule: Schedule) -> list[int | float]:
    """Returns the peak number of microbatches with only their input on each stage; 0 without recomputation."""
    return [_whole(max(live_inputs(schedule, stage)), schedule.chunks) for stage in range(schedule.stages)]


def _recomputed(schedule: Schedule, stage: int) -> set[tuple[int, int]]:
    recomputes = (each for each in schedule.by_stage[stage] if each is not None and each.kind == Kind.RECOMPUTE)
    return {(action.microbatch, action.chunk) for action in recomputes}


def _held(actions: Sequence[Action | None], starts: Callable[[Action], bool], last: Kind) -> list[int]:
    """Counts the values that exist in each tick, from the action that starts one to the tick of its last action."""
    started = accumulate(action is not None and starts(action) for action in actions)
    ended = accumulate((action is not None and action.kind == last for action in actions), initial=0)
    return [a - b for a, b in zip(started, ended, strict=False)]


def _whole(count: int, chunks: int) -> int | float:
    return count // chunks if count % chunks == 0 else count / chunks


def schedule_to_json(schedule: Schedule, timing: Timing) -> dict[str, Any]:
    """Returns the figures of a schedule as JSON values, for `--json`."""
    return {
        "name": schedule.name,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "virtual": schedule.chunks,
        **timing._asdict(),
        "peak_activations": peak_activations(schedule),
        "peak_inputs": peak_inputs(schedule),
    }


def summarize(schedule: Schedule, timing: Timing) -> str:
    """Returns the costs of a schedule as a few lines of text."""
    rows = [
        ("time", f"{timing.time:.6g}", f"{timing.ticks} ticks, each as long as its slowest action"),
        ("ideal time", f"{timing.ideal_time:.6g}", "the same order, if no stage waits for a tick to end"),
        ("bubble", f"{timing.bubble:.1%}", "of the time, stages are idle"),
        ("peak activations", _join(peak_activations(schedule)), "microbatches, stage by stage"),
    ]
    if any(peak_inputs(schedule)):
        rows.append(("peak inputs", _join(peak_inputs(schedule)), "microbatches with only their input on a stage"))
    width = max(len(value) for _, value, _ in rows if len(value) <= 16)  # the values of many stages can be longer
    return "\n".join(f"{name:<18}{value:<{width}}  {meaning}" for name, value, meaning in rows)


def _join(numbers: Sequence[int | float]) -> str:
    return " ".join(f"{number:g}" for number in numbers)
