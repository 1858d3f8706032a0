"""Pipeline parallel: each device holds some of the layers, and microbatches pass through the devices in sequence.

Use it between hosts if the network is too slow for the traffic of `fsdp` or `tensor`: a stage sends only the
activations of one microbatch to its neighbor. It needs a model in blocks, and several microbatches for each stage:
under `1f1b`, a stage is idle for (S - 1) / (M + S - 1) of a step.

Syntax, for blocks stacked on dim 0, split over the axis `pipe` of size S, and a batch split into M microbatches:

    W[L_pipe, D, F]                                              every stage has its own L / S layers
    In[M, B, D] {stage s}  ->  Out[M, B, D] {stage s + 1}        ppermute over pipe, at every tick

A schedule lists the action of each stage at each tick: forward of one microbatch (F), backward to the input (B),
backward to the weights (W), or recomputed forward (R). `schedule/schedule_table.py` defines the table, and
`schedule/builders.py` builds the schedules and documents their times. `blocks/split_backward.py` splits a block into F,
B and W, and `executor/pipeline_loss.py` runs the ticks: all stages run one program.

1. At the end of a tick, stages send activations up and gradients down: permutes of one microbatch's activations. On
   GPUs, a stage sends only what its neighbor reads; on simulated devices, every stage sends both in every tick. The
   receiver's timetable determines what to keep. In the "v" placement, both activations and gradients travel in both
   directions; nothing else changes.
2. The residuals of a forward stay on the stage, in buffers with the size of the schedule's peak. With `recompute`, only
   the stage's input stays, and R recomputes the rest just before B.
3. All stages hold the same embedding and head. The embedding runs in F on the stage of the first chunk. The head runs,
   forward and backward, in B on the stage of the last chunk. Each stage has the gradients of the parts that it ran and
   zeros for the others; one all-reduce over `pipe`, together with the loss, sums them. A table that embedding and head
   share needs no further communication.
4. FSDP gathers the parameters of a block in every F, R and B: 2 M or 3 M times per step, or once with
   `strategy.fsdp.keep: step`. A stage sums whole gradients in the parameters' dtype, 4 bytes for each parameter of its
   blocks, embedding and head, and FSDP scatters the sums once per step. With `scatter: microbatch` a stage keeps only
   shards, and FSDP scatters M times: in every W, and in every B of the embedding and the head.
5. With `embed_and_head: split`, each stage stores a shard of the parameters outside the blocks, and gathers them for
   the step:

       before    W[V, D] = all-gather over pipe of W[V_pipe, D]             in the parameters' dtype, once per step
       after     dW[V_pipe, D] = reduce-scatter over pipe of dW[V, D]       in the reduce dtype, once per step

   Parameters, gradients after the step and the optimizer's state take 1 / S of the memory. The two collectives replace
   the all-reduce of these gradients, and move as many bytes if parameters are as wide as their gradients. `pipe` is
   the innermost axis of a dim: FSDP gathers the result of the gather over `pipe`, and scatters before the scatter over
   `pipe`. (Rajbhandari et al. 2020, "ZeRO", section 5.1, with stages for data.)

Bytes: M activations up and M gradients down for each pair of neighbors, where each has B L D / M elements in its own
dtype; on simulated devices, one of each in every tick. Both
are on the critical path, since the next tick needs them. The step is compute-bound if the forward of a chunk with P
parameters, 2 B L P / M operations, takes longer than a transfer: P / D > C / W, where C is a device's FLOP/s and W its
bandwidth to a neighbor in bytes/s.

Sources: Huang et al. 2019, "GPipe", section 2.3; Narayanan et al. 2021, "Efficient Large-Scale Language Model Training
on GPU Clusters", section 2.2; Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Literal

import jax
from jax import Array, lax

from ..layouts.paths import in_blocks
from ..layouts.tensor_layout import TensorLayout, split_further, without_axes
from ..mesh.errors import UserError
from .collectives import Collective, StepCounts, keep_split, wire_bytes
from .model import Params
from .options import LocalPath, check_options
from .plan import MeshPlan, Parameter, ShardingPlan, no_problems, splits_nothing, summed_elsewhere
from .schedule.builders import make_schedule
from .schedule.schedule_table import Kind, Schedule
from .schedule.stages import assign
from .schedule.timetable import Pipeline, make_timetable

AXIS = "pipe"


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Options of the strategy `pipe`."""

    size: int = 1
    """Stages S: devices over which the layers are split; -1 = the rest."""
    schedule: LocalPath = "1f1b"
    """The schedule: gpipe, 1f1b, interleaved_1f1b, zb_h1, zbv, or the path of your own CSV file."""
    microbatches: int = 0
    """Microbatches M, at least S, that a device's rows are split into; 0 = 2 S. More microbatches mean less idle
    time."""
    virtual: int = 0
    """Chunks V of the model on each stage; 0 = the default of the schedule."""
    layers: tuple[int, ...] = ()
    """Layers of each of the S x V chunks, in the order of the model; empty = as even as possible."""
    embed_and_head: Literal["whole", "split"] = "whole"
    """Storage of embedding and head: whole on each stage, or split over the stages and gathered in each step."""
    scatter: Literal["step", "microbatch"] = "step"
    """Time of FSDP's reduce-scatter of a stage's gradients: once per step, with memory for whole gradients, or after
    each microbatch."""
    recompute: bool = False
    """Keep only the input of a stage for backward, and recompute the rest."""

    def __post_init__(self) -> None:
        check_options(AXIS, self)


OPTIONS = PipelineConfig
SPLITS = ("parameters",)
update_layout = splits_nothing
check = no_problems
reduce = summed_elsewhere


def layout(parameter: Parameter, placed: TensorLayout, plan: MeshPlan) -> tuple[TensorLayout, str]:
    """Returns the layout of one parameter: blocks split over stages; embedding and head whole, or split along a dim."""
    if plan.pipeline is None:
        return placed, ""
    if parameter.stacked:
        return TensorLayout((AXIS, *placed.axes[1:]), plan.mesh), f"{AXIS}: dim 0"
    found = split_further(placed, parameter.shape, plan.mesh, AXIS, first=0) if splits_embed_and_head(plan) else None
    return (found[0], f"{AXIS}: dim {found[1]}") if found else (placed, "")


def splits_embed_and_head(plan: MeshPlan) -> bool:
    """Returns whether parameters outside the blocks are split over the stages between steps."""
    return plan.in_force(AXIS, "embed_and_head", "whole") == "split"


def used_layout(path: str, layout: TensorLayout) -> TensorLayout:
    """Returns the layout of a parameter within a step: outside the blocks, no parameter is split over `pipe`."""
    return layout if in_blocks(path) or _dim(layout) is None else without_axes(layout, (AXIS,))


def begin(params: Params, plan: ShardingPlan) -> Params:
    """Gathers parameters outside the blocks along `pipe`."""

    def gather(leaf: Array, dim: int) -> Array:
        return lax.all_gather(leaf, AXIS, axis=dim, tiled=True)

    return _over_pipe(gather, params, plan)


def finish(gradients: Params, plan: ShardingPlan) -> Params:
    """Sums the gradients of parameters outside the blocks over the stages; each stage keeps its shard."""

    def scatter(leaf: Array, dim: int) -> Array:
        summed = leaf.astype(plan.options.precision.reduce)
        return lax.psum_scatter(summed, AXIS, scatter_dimension=dim, tiled=True).astype(leaf.dtype)

    return _over_pipe(scatter, gradients, plan)


def _over_pipe(function: Callable[[Array, int], Array], tree: Params, plan: ShardingPlan) -> Params:
    def apply(leaf: Array, layout: TensorLayout) -> Array:
        dim = _dim(layout)
        return leaf if dim is None else keep_split(lambda part, _: function(part, dim), leaf, AXIS, layout, dim)

    if plan.pipeline is None:
        return tree
    layouts = plan.table.layouts
    changed = {name: jax.tree.map(apply, group, layouts[name]) for name, group in tree.items() if name != "blocks"}
    return {**tree, **changed}


def _dim(layout: TensorLayout) -> int | None:
    return next((dim for dim in range(len(layout.axes)) if AXIS in layout.axes_of_dim(dim)), None)


def cost(plan: ShardingPlan, counts: StepCounts, platform: str) -> list[Collective]:
    """Returns the permutes of all ticks, and a gather and a scatter for each split parameter outside the blocks."""
    lines, summed = [], plan.options.precision.reduce
    for row, used in zip(plan.table.rows, plan.used_table.rows, strict=True):
        if not in_blocks(row.path) and _dim(row.layout) is not None:
            elements = prod(used.layout.shard_shape(row.shape))
            lines.append(Collective("all-gather", (AXIS,), 1, elements * wire_bytes(row.dtype, platform)))
            if row.path not in plan.frozen:
                lines.append(Collective("reduce-scatter", (AXIS,), 1, elements * wire_bytes(summed, platform)))
    if plan.pipeline is None:
        return lines
    for leaf, times in counts.sent:
        one = Collective("collective-permute", (AXIS,), 1, leaf.size * wire_bytes(leaf.dtype, platform))
        lines.append(one.times(times * plan.options.accumulate))
    return lines


def make_pipeline(config: PipelineConfig, num_blocks: int) -> Pipeline:
    """Builds a pipeline.

    Args:
        config: The strategy's options, with a known size.
        num_blocks: The number of blocks in the model.

    Raises:
        UserError: The schedule does not fit the sizes, or the blocks cannot be split over the stages.
    """
    microbatches = config.microbatches or 2 * config.size
    try:
        schedule = make_schedule(
            config.schedule, config.size, microbatches, virtual=config.virtual or None, recompute=config.recompute
        )
        _check_recomputed(schedule)
    except UserError as error:
        raise UserError(f"strategy.pipe.schedule={config.schedule}: {error}") from None
    stages = assign(num_blocks, schedule, config.layers)
    return Pipeline(schedule, stages, make_timetable(schedule, stages))


def _check_recomputed(schedule: Schedule) -> None:
    """Checks that all forwards are recomputed or none: every forward must keep the same residuals."""
    kinds = Counter(action.kind for _, _, action in schedule.actions())
    forwards, recomputed = kinds[Kind.FORWARD], kinds[Kind.RECOMPUTE]
    if 0 < recomputed < forwards:
        raise UserError(
            f"{recomputed} of {forwards} forwards are recomputed (R), but a schedule must recompute all or none. Add "
            f"the {forwards - recomputed} missing R, or remove all."
        )
