"""The time of a pipeline on its stages, from the times of the parts of a tick in the compiled program.

A stage runs the actions of its column of the timetable one after the other. At the end of a tick, two stages that
exchange a message wait for each other; a stage that sends and receives nothing goes on.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ..parallel.schedule.schedule_table import Action, Schedule
from ..parallel.schedule.timetable import Timetable, turns_of
from ..parallel.xla.optional_turns import EXCHANGE


def tick_seconds(timetable: Timetable, parts: Mapping[str, Sequence[float]]) -> np.ndarray:
    """Returns the seconds of each tick on each stage without its message, (ticks, stages).

    Args:
        timetable: The timetable of the pipeline.
        parts: The part of a tick, such as "forward" -> the seconds of its branches. The longer one runs it, for the
            largest number of blocks, and the other one skips it.
    """
    seconds = np.zeros(timetable.entries.kind.shape)
    for part, turns in turns_of(timetable).items():
        branches = parts.get(part, [0.0])
        share = turns / max(turns.max(), 1)
        seconds += min(branches) + (max(branches) - min(branches)) * share
    return seconds


def pipeline_seconds(timetable: Timetable, parts: Mapping[str, Sequence[float]]) -> float:
    """Returns the seconds of one run of a timetable.

    Args:
        timetable: The timetable of the pipeline.
        parts: The argument of `tick_seconds`, and "exchange" -> the seconds of each of `timetable.sends`.
    """
    ticks, sends = tick_seconds(timetable, parts), parts[EXCHANGE]
    clock = np.zeros(ticks.shape[1])
    for tick, index in enumerate(timetable.entries.sends[:, 0]):
        clock += ticks[tick]
        directions = [pairs for pairs in timetable.sends[index] if pairs]
        for pairs in directions:
            ends = clock.copy()
            for pair in pairs:
                stages = list(pair)
                ends[stages] = np.maximum(ends[stages], clock[stages].max() + sends[index] / len(directions))
            clock = ends
    return float(clock.max())


def idle_share(timetable: Timetable, parts: Mapping[str, Sequence[float]]) -> float:
    """Returns the share of a pipeline's time in which stages are idle or wait, over all stages.

    Args:
        timetable: The timetable of the pipeline.
        parts: The argument of `pipeline_seconds`.
    """
    busy = tick_seconds(timetable, {part: (0.0, max(branches)) for part, branches in parts.items()})
    return 1 - float(busy.sum()) / (busy.shape[1] * pipeline_seconds(timetable, parts))


def textbook_seconds(schedule: Schedule, timetable: Timetable, parts: Mapping[str, Sequence[float]]) -> float:
    """Returns the seconds of a schedule if messages take no time and each action starts when what it needs is done.

    Args:
        schedule: The schedule.
        timetable: Its timetable.
        parts: The argument of `tick_seconds`; the time to skip a part does not count.
    """
    ticks = tick_seconds(timetable, {part: (0.0, max(branches)) for part, branches in parts.items()})
    free = [0.0] * schedule.stages
    done: dict[tuple[int, Action], float] = {}
    for tick, stage, action in schedule.actions():
        start = max([free[stage], *(done.get(need, 0.0) for need in schedule.needs(stage, action))])
        free[stage] = done[stage, action] = start + float(ticks[tick, stage])
    return max(free)
