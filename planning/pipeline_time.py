"""The time of a pipeline on its stages, from the times of the parts of a tick in the compiled program.

A stage runs the actions of its column of the timetable one after the other. At the end of a tick, two stages that
exchange a message wait for each other; a stage that sends and receives nothing goes on.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ..parallel.schedule.timetable import Timetable, turns_of


def tick_seconds(timetable: Timetable, parts: Mapping[str, float]) -> np.ndarray:
    """Returns the seconds of each action without its message, (ticks, stages).

    Args:
        timetable: The timetable of the pipeline.
        parts: The part of a tick, such as "forward" -> the seconds that it takes on a stage that runs it.
    """
    seconds = np.zeros(timetable.entries.kind.shape)
    for part, turns in turns_of(timetable).items():
        seconds += parts.get(part, 0.0) * (turns > 0)
    return seconds


def pipeline_seconds(timetable: Timetable, ticks: np.ndarray, sends: Sequence[float]) -> float:
    """Returns the seconds of one run of a timetable.

    Args:
        timetable: The timetable of the pipeline.
        ticks: The result of `tick_seconds`.
        sends: The seconds of a message in each of `timetable.sends`.
    """
    clock = np.zeros(ticks.shape[1])
    for tick, index in enumerate(timetable.entries.sends[:, 0]):
        clock += ticks[tick]
        for pairs in timetable.sends[index]:
            ends = clock.copy()
            for pair in pairs:
                stages = list(pair)
                ends[stages] = np.maximum(ends[stages], clock[stages].max() + sends[index])
            clock = ends
    return float(clock.max())
