"""The schedule of an evaluation: forwards alone."""

from .table import Action, Kind, Schedule


def forwards_only(schedule: Schedule, microbatches: int) -> Schedule:
    """A schedule of forwards alone, for evaluation: each stage takes what has come furthest through the model.

    Args:
        schedule: Its stages, chunks and placement are kept.
        microbatches: M, any number.
    """
    done: dict[tuple[int, int], int] = {}
    by_stage: list[list[Action | None]] = [[] for _ in range(schedule.stages)]
    upcoming = [
        sorted((-schedule.virtual_stage(stage, chunk), chunk) for chunk in range(schedule.chunks))
        for stage in range(schedule.stages)
    ]
    count = dict.fromkeys(range(schedule.num_virtual_stages), 0)
    for tick in range(schedule.num_virtual_stages * (microbatches + 1)):
        for stage, actions in enumerate(by_stage):
            actions.append(None)
            for minus, chunk in upcoming[stage]:
                here, microbatch = -minus, count[-minus]
                ready = here == 0 or done.get((here - 1, microbatch), tick) < tick
                if microbatch < microbatches and ready:
                    done[here, microbatch] = tick
                    count[here] += 1
                    actions[-1] = Action(Kind.FORWARD, microbatch, chunk)
                    break
        if count[schedule.num_virtual_stages - 1] == microbatches:
            break
    return Schedule(
        name=f"forwards of {schedule.name}",
        stages=schedule.stages,
        microbatches=microbatches,
        chunks=schedule.chunks,
        placement=schedule.placement,
        by_stage=tuple(map(tuple, by_stage)),
    )
