"""Pipeline parallel: the layers live on different devices, and microbatches pass through them one behind the other.

Syntax, for blocks stacked on dim 0, dealt out over the axis `pipe` of size S, and a batch cut into M microbatches:

    W[L_pipe, D, F]                                              every stage holds its own L / S layers
    In[M, B, D] {stage s}  ->  Out[M, B, D] {stage s + 1}        ppermute over pipe, at every tick

A schedule says what each stage does at each tick: forward of one microbatch (F), backward to the input (B), backward to
the weights (W), or forward once more (R); `schedule/table.py` and `schedule/builders.py` tell which there are and how
long they take. `blocks/split_backward.py` cuts a block into F, B and W; `executor/run.py` runs the ticks, all stages
one program.

1. At the end of a tick each stage sends what it made up (activations) and down (gradients): two permutes of one
   microbatch's activations, whether there is something to send or not. The receiver's timetable says what to keep. In
   the "v" both kinds travel both ways; nothing else changes.
2. What backward needs of a forward stays on the stage, in buffers whose size follows the schedule's peak. With
   `recompute` only the stage's input stays, and R makes the rest just before B.
3. Embedding and head are the same on all stages (or split between steps, see `executor/embed_and_head.py`). The
   embedding runs on the stage of the first piece, in its F; the head on that of the last, forward and backward in its
   B. Each stage has the gradients of what it ran, 0 of the others, and one all-reduce over `pipe` with the loss adds
   them up: a table that both share needs nothing more.
4. Parameters of blocks are gathered (FSDP) in every F, R and B and their gradients scattered in every W, M times a
   step; `strategy.fsdp.keep: step` gathers once.

Bytes: ticks x (up + down), each one microbatch of activations B L D / M in its own dtype; both are on the critical
path, since the next tick starts with what they bring. Compute-bound while a piece's forward 2 B L P / M (P parameters a
piece) takes longer than that: P / D > C / W, with C the FLOP/s of a device and W its bytes/s to its neighbour.

Sources: Huang et al. 2019, "GPipe", section 2.3; Narayanan et al. 2021, "Efficient Large-Scale Language Model Training
on GPU Clusters", section 2.2; Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..mesh.errors import UserError
from ..mesh.options import check_options
from .schedule.builders import make_schedule
from .schedule.stages import Stages, assign
from .schedule.table import Action, Kind, Schedule, check
from .schedule.timetable import Timetable, make_timetable

AXIS = "pipe"


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Options of the strategy `pipe`."""

    size: int = 1
    """Stages S: devices that the layers are dealt out to; -1 = the rest."""
    schedule: str = "1f1b"
    """Who does what when: gpipe, 1f1b, interleaved_1f1b, zb_h1, zbv, or the path of a CSV file of your own."""
    microbatches: int = 0
    """Pieces M, at least S, that a device's rows are cut into; 0 = 2 S. More of them leave less idle time."""
    virtual: int = 0
    """Pieces V of the model on each stage; 0 = what the schedule is made for."""
    layers: tuple[int, ...] = ()
    """Layers of each of the S x V pieces, in the order of the model; () = as equally many as can be."""
    embed_and_head: Literal["whole", "split"] = "whole"
    """Whether each stage stores embedding and head whole, or a part of them that is gathered in each step."""
    recompute: bool = False
    """Whether a stage keeps only what it was given for backward, and runs forward again to have the rest."""

    def __post_init__(self) -> None:
        check_options(AXIS, self)


class Pipeline(NamedTuple):
    """A pipeline, worked out.

    Attributes:
        schedule: Who does what when.
        stages: Which layers live where.
        timetable: The schedule as the executor reads it.
    """

    schedule: Schedule
    stages: Stages
    timetable: Timetable


def make_pipeline(config: PipelineConfig, num_blocks: int) -> Pipeline:
    """Works out a pipeline.

    Args:
        config: The strategy's options, its size known.
        num_blocks: Blocks of the model.

    Raises:
        UserError: The schedule does not fit the sizes, or the blocks cannot be dealt out.
    """
    microbatches = config.microbatches or 2 * config.size
    try:
        schedule = make_schedule(
            config.schedule, config.size, microbatches, virtual=config.virtual or None, recompute=config.recompute
        )
        check(schedule)
        _check_recomputed(schedule)
    except UserError as error:
        raise UserError(f"strategy.pipe.schedule={config.schedule}: {error}") from None
    stages = assign(num_blocks, schedule, config.layers)
    return Pipeline(schedule, stages, make_timetable(schedule, stages))


def _check_recomputed(schedule: Schedule) -> None:
    """Checks that all forwards are computed again, or none: what the first time leaves is the same for all."""
    of_kind = {
        kind: {
            (stage, action.chunk, action.microbatch) for _, stage, action in schedule.actions() if action.kind == kind
        }
        for kind in (Kind.FORWARD, Kind.RECOMPUTE)
    }
    missing = sorted(of_kind[Kind.FORWARD] - of_kind[Kind.RECOMPUTE])
    if of_kind[Kind.RECOMPUTE] and missing:
        stage, chunk, microbatch = missing[0]
        raise UserError(
            f"{len(of_kind[Kind.RECOMPUTE])} of {len(of_kind[Kind.FORWARD])} forwards are computed again (R), but not "
            f"F{microbatch} of chunk {chunk} on stage {stage}. A run computes all again or none: add the "
            f"{len(missing)} missing R, or take all out."
        )


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
