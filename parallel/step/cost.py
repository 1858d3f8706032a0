"""Predicts the collectives of one step, from the strategies' costs: nothing runs or is compiled.

counts = the inputs besides the layouts: the calls of the model's parts, and the model's own collectives
lines  = the cost of each strategy, the reduction of the norm, and the model's own sums over all rows
"""

import warnings
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from ...layouts.paths import in_blocks
from ...mesh.errors import UserError
from ...mesh.keys import make_key
from ..blocks.backward_gathers import ALL_REDUCE, find_backward_collectives, find_backward_gathers
from ..blocks.ends import separates_ends
from ..blocks.model_parts import recomputes_output
from ..blocks.prefetch import prefetches_blocks
from ..collectives import CallCounts, Collective, StepCounts, Traffic
from ..executor.pipeline_loss import sent_in_a_step
from ..model import AbstractBatch, Batch, BlockModel, Model, Params, fold_block, has_state
from ..model.loss_sums import as_sums
from ..options import cast_floats, cast_inputs
from ..plan import ShardingPlan
from ..schedule.timetable import Timetable, count_turns
from ..sharding.batch_rows import record_batch_axes
from ..sharding.lay_out import abstract_parameters
from ..sharding.strategies import STRATEGIES, axes_that_split
from ..xla.graph import trace
from ..xla.platform import uses
from ..xla.ring_hop import convert_hops
from ..xla.traced_sums import all_reduces, other_collectives, sum_key
from .composition import DeviceStep, split_model
from .gradients import norm_cost
from .manual_axes import UncheckedStep, over_manual_axes
from .state import abstract_model_state

COUNTED = ("embed", "embed_backward", "forward", "recompute", "backward_input", "backward_weight", "head_backward")
"""The parts of a tick with the turns that `CallCounts` begins with, in order."""


def step_cost(
    model: Model | BlockModel,
    plan: ShardingPlan,
    batch: AbstractBatch | None,
    platform: str,
    without: Collection[str] = (),
) -> list[Collective]:
    """Returns every collective of one step, unmerged.

    Args:
        model: The model, not split.
        plan: The plan, with the options of the step.
        batch: The global shapes of a batch; a model that splits its own work moves bytes in proportion to it. Without
            them, the result assumes that backward reads every parameter of a block, and omits a model's own sums over
            all rows.
        platform: The platform of the step.
        without: The paths of parameters whose collectives are omitted; those of the others do not change.

    Raises:
        UserError: The shapes of a batch are needed, but missing.
    """
    return StepCost(model, plan, batch, platform).lines(without)


class StepCost:
    """The collectives of one step; the model is traced only once. The arguments are those of `step_cost`.

    Attributes:
        of_the_model: The collectives that a model with rows that depend on each other asks for itself.
    """

    def __init__(
        self, model: Model | BlockModel, plan: ShardingPlan, batch: AbstractBatch | None, platform: str
    ) -> None:
        self._plan = plan
        self._platform = platform
        counts = step_counts(split_model(model, plan), plan, batch, platform)
        self.of_the_model: list[Collective] = []
        if batch is not None:
            metrics, couples_rows = _trace_loss(model, plan, batch)
            counts = counts._replace(metrics=metrics)
            if couples_rows:
                self.of_the_model = collectives_of_rows(model, plan, batch, platform)
        self._counts = counts

    def lines(self, without: Collection[str] = ()) -> list[Collective]:
        """Returns every collective, unmerged, without those of the parameters at some paths."""
        plan = self._plan
        moved = plan.without(without) if without else plan
        layouts = [row.layout for row in plan.trained.update_table.rows]
        lines = [line for each in STRATEGIES.values() for line in each.cost(moved, self._counts, self._platform)]
        lines += norm_cost(layouts, plan.summed_axes, plan.options.precision.reduce)
        lines += self.of_the_model
        return [line for line in lines if line.bytes]  # arrays without elements move nothing


def step_counts(
    model: Model | BlockModel, plan: ShardingPlan, batch: AbstractBatch | None, platform: str
) -> StepCounts:
    """Returns the inputs of the costs besides the plan; the arguments are those of `step_cost`, the model split."""
    pipeline, options = plan.pipeline, plan.options
    calls = count_calls(model, options.accumulate, pipeline.timetable if pipeline else None)
    if not isinstance(model, BlockModel):
        return StepCounts(calls)
    if batch is None and model.traffic is None and pipeline is None:
        return StepCounts(calls, unread=_unread(model, plan, calls, None, platform))
    shapes = _microbatch(plan, batch)
    sent = sent_in_a_step(model, plan, shapes, platform) if pipeline else ()
    own = tuple(_model_collectives(model, plan, calls, shapes, platform))
    return StepCounts(calls, own, sent, unread=_unread(model, plan, calls, shapes, platform))


def _unread(
    model: BlockModel, plan: ShardingPlan, calls: CallCounts, shapes: AbstractBatch | None, platform: str
) -> dict[str, int]:
    """Returns, for each parameter, the number of a block's backward calls that do not read it."""
    paths = [row.path for row in plan.table.rows if in_blocks(row.path)]
    before_head = [row.path for row in plan.table.rows if row.path.split("/")[0] != "head"]
    if plan.pipeline is None and plan.frozen.issuperset(before_head):
        return dict.fromkeys(paths, calls.block_again + calls.block_backward)
    first = plan.options.accumulate
    unread = dict.fromkeys(paths, first) if separates_ends(model, plan) else {}  # the last block, still gathered
    if shapes is None or plan.keeps_blocks or not plan.gathers_blocks:
        return unread
    inner, of_first = find_backward_gathers(model, plan, shapes)
    if prefetches_blocks(plan) and uses("order", platform):  # waits read every gather
        return {path: calls.block_backward - first for path in paths if path not in inner}
    return {
        path: max((calls.block_backward - first) * (path not in inner), unread.get(path, 0))
        + first * (path not in of_first)
        for path in paths
    }


def _microbatch(plan: ShardingPlan, batch: AbstractBatch | None) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of one microbatch on one device, as the model receives it."""
    if batch is None:
        raise UserError("The collectives of this step depend on the shapes of the batch. Pass abstract_batch.")
    rows = jax.eval_shape(lambda batch: cast_inputs(batch, plan.options.precision.compute), dict(batch))
    return plan.rows(plan.options.accumulate).part(rows)


def _trace_loss(model: Model | BlockModel, plan: ShardingPlan, batch: AbstractBatch) -> tuple[int, bool]:
    """Returns the number of scalars in the metrics of a loss, and whether its rows depend on each other.

    The loss is traced without a mesh. For a `BlockModel`, only the embedding, one block (if the model is not split) and
    the head are traced.
    """
    params = abstract_parameters(model, plan.options.precision)
    params = jax.eval_shape(lambda tree: cast_floats(tree, plan.options.precision.compute), params)
    rows, key = _microbatch(plan, batch), jax.eval_shape(lambda: make_key(0))
    state = abstract_model_state(model, plan.options.precision.params)

    def loss(params: Params, rows: Batch, key: Array, state: Any) -> Any:
        if isinstance(model, BlockModel):  # blocks do not change the metrics of the head
            x = model.embed({name: params[name] for name in model.embed_reads}, rows, key)
            if model.parallelize is None:
                one = jax.tree.map(lambda leaf: leaf[0], params["blocks"])
                x = model.block(one, x, fold_block(key, jnp.asarray(0)))
            return model.head({name: params[name] for name in model.head_reads}, x, rows, key)
        return model.loss(params, rows, key, *((state,) if has_state(model) else ()))

    with record_batch_axes() as requests:
        try:
            found = jax.eval_shape(lambda *given: as_sums(loss(*given)).metrics, params, rows, key, state)
        except Exception:  # a model that only runs on its mesh, with collectives of its own
            return 0, True
    return len(jax.tree.leaves(found)), bool(requests) or has_state(model)


def collectives_of_rows(
    model: Model | BlockModel, plan: ShardingPlan, batch: AbstractBatch, platform: str
) -> list[Collective]:
    """Returns the collectives of a model with rows that depend on each other, including the sums of its state.

    Such a model sums over the rows of all devices (batch norm), or gathers them (a contrastive loss). Its collectives
    are read from the traced program of its loss and gradients. The arguments are those of `step_cost`.
    """
    if plan.pipeline or plan.output_rules or not plan.summed_axes:
        return []
    device_step, mesh, found = DeviceStep(model, plan), plan.mesh, list[Collective]()
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    has_traffic = isinstance(device_step.model, BlockModel) and device_step.model.traffic is not None
    predicted_elsewhere = axes_that_split("work") if has_traffic else ()
    after = sum_key(plan.summed_axes, plan.options.precision.reduce, platform)

    def record(params: Params, rows: Batch, state: Any) -> Array:
        graph, (*waited_for, _) = trace(device_step.local_sums, params, rows, state)
        first = graph.outputs[: len(jax.tree.leaves(waited_for))]
        lines = all_reduces(graph, first, after, sizes=sizes, platform=platform)
        lines += other_collectives(graph, sizes=sizes, platform=platform)
        found[:] = [line for line in lines if not set(line.axes) <= set(predicted_elsewhere)]
        return jnp.zeros(())

    specs = (plan.manual_specs(plan.table), plan.batch_spec, PartitionSpec())
    mapped = over_manual_axes(record, plan, specs, PartitionSpec(), abstract=True)
    state = abstract_model_state(model, plan.options.precision.params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncheckedStep)
        jax.eval_shape(mapped, plan.table.abstract_arrays, dict(batch), state)
    return found


def _model_collectives(
    model: BlockModel, plan: ShardingPlan, calls: CallCounts, shapes: AbstractBatch, platform: str
) -> list[Collective]:
    """Returns the model's own collectives: the traffic of its parts times their calls."""
    if model.traffic is None:
        return []
    own: list[Collective] = []
    for part, forward, backward in (
        ("embed", calls.embed, calls.embed_backward),
        ("block", calls.block, 0),
        ("head", calls.head, calls.head),
    ):
        moved = model.traffic(part, shapes, plan.options.precision.compute, platform)
        own += [line.times(forward) for line in moved.forward]
        if part == "block":
            own += _in_backward_of_blocks(model, plan, calls, shapes, moved, platform)
        else:
            own += [line.times(backward) for line in moved.backward]
    return [convert_hops(line, plan.mesh_size(line.axes[-1]), platform) for line in own] if plan.pipeline else own


def _in_backward_of_blocks(
    model: BlockModel,
    plan: ShardingPlan,
    calls: CallCounts,
    shapes: AbstractBatch,
    moved: Traffic,
    platform: str,
) -> list[Collective]:
    """Returns the collectives of the backward passes of all blocks, with those that recomputation repeats.

    The arguments are those of `_model_collectives`, and the traffic of one block.
    """
    remat = plan.options.remat
    pipeline = plan.pipeline
    needs_backward = bool(moved.backward or moved.again)
    if plan.frozen and needs_backward and not pipeline and not prefetches_blocks(plan):
        found = find_backward_collectives(model, plan, shapes, moved.forward, platform)
        if found is not None:
            turns = plan.options.accumulate
            lines = [line.times(calls.block_backward - turns) for line in found.inner]
            lines += [line.times(turns) for line in found.first]
            sums = [line for line in (*moved.backward, *moved.again) if line.kind == ALL_REDUCE]
            return lines + [line.times(calls.block_backward) for line in sums]
    kept = {"none": ("",), "local": ("all-gather", "reduce-scatter")}.get(remat, ())
    inside = [line for line in moved.again if not line.kind.startswith(kept)]  # what backward repeats
    before = moved.again if remat != "full" else ()  # what a recompute action repeats
    if pipeline and (pipeline.timetable.blocks_per_slot > 1 or recomputes_output(plan)):
        before = moved.forward
    lines = [line.times(calls.block_backward) for line in (*moved.backward, *inside)]
    return lines + [line.times(calls.block_again) for line in before]


def count_calls(model: Model | BlockModel, accumulate: int, timetable: Timetable | None = None) -> CallCounts:
    """Returns the calls of the parts of a model in one step on a device.

    Args:
        model: The model.
        accumulate: The number of microbatches, each of which runs the whole model, or the timetable of a pipeline.
        timetable: The timetable of a pipeline; None if every device runs the whole model.
    """
    groups: dict[str, int] = {}
    blocks = model.num_blocks if isinstance(model, BlockModel) else 0
    turns = dict.fromkeys(("embed", "embed_backward", "head_backward"), 1) | {"recompute": 0}
    turns |= dict.fromkeys(("forward", "backward_input", "backward_weight"), blocks)
    if timetable and isinstance(model, BlockModel):
        turns, blocks = count_turns(timetable), timetable.stored_blocks
        for reads, part in ((model.embed_reads, "embed_backward"), (model.head_reads, "head_backward")):
            for name in reads:
                groups[name] = groups.get(name, 0) + turns[part] * accumulate
    calls = (turns[part] * accumulate for part in COUNTED)
    return CallCounts(*calls, rows=blocks, group_gradients=groups, others=accumulate)
