"""Pipeline parallel: the layers live on different devices, and microbatches pass through them one behind the other.

Use it between hosts, where the network is too slow for what `fsdp` or `tensor` would send: a stage sends one
microbatch of activations to its neighbour. It needs a model in blocks, and several microbatches for each stage: under
`1f1b` a stage is idle for (S - 1) / (M + S - 1) of a step.

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
3. Embedding and head are the same on all stages. The embedding runs on the stage of the first piece, in its F; the
   head runs on that of the last, forward and backward in its B. Each stage has the gradients of what it ran, and zeros
   for the rest; one all-reduce over `pipe`, together with the loss, adds them up. A table that both share needs nothing
   more.
4. Parameters of blocks are gathered (FSDP) in every F, R and B and their gradients scattered in every W, M times a
   step; `strategy.fsdp.keep: step` gathers once.
5. With `embed_and_head: split`, a stage stores a part of what is outside the blocks, and has the whole for a step:

       before    W[V, D] = all-gather over pipe of W[V_pipe, D]             in the parameters' dtype, once a step
       after     dW[V_pipe, D] = reduce-scatter over pipe of dW[V, D]       in the reduce dtype, once a step

   Parameters, gradients after the step and the optimizer's state take 1 / S of the room. The two replace the
   all-reduce of these gradients and move as much, if parameters are as wide as their gradients. The axis is the
   innermost of a dim: FSDP gathers what comes out of the gather over pipe, and scatters before the scatter.
   (Rajbhandari et al. 2020, "ZeRO", section 5.1, with stages for data.)

Bytes: ticks x (up + down), each one microbatch of activations B L D / M in its own dtype; both are on the critical
path, since the next tick starts with what they bring. Compute-bound while a piece's forward 2 B L P / M (P parameters a
piece) takes longer than that: P / D > C / W, with C the FLOP/s of a device and W its bytes/s to its neighbour.

Sources: Huang et al. 2019, "GPipe", section 2.3; Narayanan et al. 2021, "Efficient Large-Scale Language Model Training
on GPU Clusters", section 2.2; Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Literal

import jax
from jax import Array, lax

from ..layouts.paths import in_blocks
from ..layouts.split_dim import split_further
from ..layouts.tensor_layout import TensorLayout
from ..mesh.errors import UserError
from ..mesh.options import check_options
from .collectives import Collective, StepCounts, wire_bytes
from .model import Params
from .plan import MeshPlan, Parameter, ShardingPlan, no_problems, splits_nothing, summed_elsewhere
from .schedule import table
from .schedule.builders import make_schedule
from .schedule.stages import assign
from .schedule.table import Kind, Schedule
from .schedule.timetable import Pipeline, make_timetable

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


OPTIONS = PipelineConfig
SPLITS = ("parameters",)
update_layout = splits_nothing
check = no_problems
reduce = summed_elsewhere


def layout(parameter: Parameter, placed: TensorLayout, plan: MeshPlan) -> tuple[TensorLayout, str]:
    """Where one parameter lives: blocks on their stages; embedding and head whole, or split along a dim."""
    if plan.pipeline is None:
        return placed, ""
    if parameter.stacked:
        return TensorLayout((AXIS, *placed.axes[1:]), plan.mesh), f"{AXIS}: dim 0"
    found = split_further(placed, parameter.shape, plan.mesh, AXIS, first=0) if splits_embed_and_head(plan) else None
    return (found[0], f"{AXIS}: dim {found[1]}") if found else (placed, "")


def splits_embed_and_head(plan: MeshPlan) -> bool:
    """Whether what is outside the blocks is split over the stages between steps."""
    return plan.in_force(AXIS, "embed_and_head", "whole") == "split"


def used_layout(path: str, layout: TensorLayout) -> TensorLayout:
    """Where a parameter is within a step: outside the blocks nothing is split over `pipe`."""
    if in_blocks(path) or _dim(layout) is None:
        return layout
    dims = [tuple(axis for axis in layout.axes_of_dim(dim) if axis != AXIS) for dim in range(len(layout.axes))]
    return TensorLayout([axes or None for axes in dims], layout.device_mesh)


def begin(params: Params, plan: ShardingPlan) -> Params:
    """Makes what is outside the blocks whole along `pipe`."""

    def gather(leaf: Array, dim: int) -> Array:
        return lax.all_gather(leaf, AXIS, axis=dim, tiled=True)

    return _over_pipe(gather, params, plan)


def finish(gradients: Params, plan: ShardingPlan) -> Params:
    """Sums gradients of what is outside the blocks over the stages, each of which keeps its part."""

    def scatter(leaf: Array, dim: int) -> Array:
        summed = leaf.astype(plan.options.precision.reduce)
        return lax.psum_scatter(summed, AXIS, scatter_dimension=dim, tiled=True).astype(leaf.dtype)

    return _over_pipe(scatter, gradients, plan)


def _over_pipe(function: Callable[[Array, int], Array], tree: Params, plan: ShardingPlan) -> Params:
    def apply(leaf: Array, layout: TensorLayout) -> Array:
        dim = _dim(layout)
        return leaf if dim is None else function(leaf, dim)

    if plan.pipeline is None:
        return tree
    layouts = plan.table.layouts
    changed = {name: jax.tree.map(apply, group, layouts[name]) for name, group in tree.items() if name != "blocks"}
    return {**tree, **changed}


def _dim(layout: TensorLayout) -> int | None:
    dims = [dim for dim in range(len(layout.axes)) if AXIS in layout.axes_of_dim(dim)]
    return dims[0] if dims else None


def cost(plan: ShardingPlan, counts: StepCounts, platform: str) -> list[Collective]:
    """The permutes of one step, at every tick what a stage sends; a gather and a scatter for each parameter split."""
    lines, summed = [], plan.options.precision.reduce
    for row, used in zip(plan.table.rows, plan.used_table.rows, strict=True):
        if not in_blocks(row.path) and _dim(row.layout) is not None:
            elements = prod(used.layout.shard_shape(row.shape))
            lines.append(Collective("all-gather", (AXIS,), 1, elements * wire_bytes(row.dtype, platform)))
            if row.path not in plan.frozen:
                lines.append(Collective("reduce-scatter", (AXIS,), 1, elements * wire_bytes(summed, platform)))
    if plan.pipeline is None:
        return lines
    ticks = plan.options.accumulate * len(plan.pipeline.timetable.entries.kind)
    sizes = [leaf.size * wire_bytes(leaf.dtype, platform) for leaf in counts.sent]
    return [*lines, Collective("collective-permute", (AXIS,), ticks * len(sizes), ticks * sum(sizes))]


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
        table.check(schedule)
        _check_recomputed(schedule)
    except UserError as error:
        raise UserError(f"strategy.pipe.schedule={config.schedule}: {error}") from None
    stages = assign(num_blocks, schedule, config.layers)
    return Pipeline(schedule, stages, make_timetable(schedule, stages))


def _check_recomputed(schedule: Schedule) -> None:
    """Checks that all forwards are recomputed, or none: what the first time leaves is the same for all."""
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
            f"{len(of_kind[Kind.RECOMPUTE])} of {len(of_kind[Kind.FORWARD])} forwards are recomputed (R), but not "
            f"F{microbatch} of chunk {chunk} on stage {stage}. A run recomputes all or none: add the "
            f"{len(missing)} missing R, or take all out."
        )
