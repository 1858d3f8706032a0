"""What one step moves, as the strategies predict it: nothing runs, nothing is compiled.

counts = what the layouts do not tell: how often the model runs, what it moves by itself
lines  = every strategy's cost, in turn, the reduction of the norm, and the model's own sums over the rows of all
"""

import warnings
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from ...layouts.paths import in_blocks
from ...mesh.errors import UserError
from ...mesh.keys import make_key
from ..blocks.model_parts import recomputes_output
from ..blocks.prefetch import prefetches_blocks
from ..blocks.read_again import all_to_alls_again, read_again
from ..collectives import CallCounts, Collective, StepCounts, Traffic
from ..executor.loss import sent_at_a_tick
from ..model import Batch, BlockModel, Model, Params, fold_block, has_state
from ..model.loss_sums import as_sums
from ..model.row_axes import noticing
from ..plan import ShardingPlan
from ..precision import cast_floats, cast_inputs
from ..sharding.lay_out import abstract_parameters
from ..sharding.strategies import STRATEGIES
from ..xla.graph import trace
from ..xla.neighbours import as_sent
from ..xla.platform import TRICKS
from ..xla.traced_sums import all_reduces, sum_key
from .call_counts import pipeline_counts, plain_counts
from .composition import DeviceStep, as_split
from .gradients import norm_cost
from .manual_axes import UncheckedStep, over_manual_axes
from .model_state import abstract_model_state


class _Loss(NamedTuple):
    """What a loss tells as it is traced: how many scalars its metrics are, and whether rows depend on each other."""

    metrics: int = 0
    couples_rows: bool = False


def step_cost(
    model: Model | BlockModel,
    plan: ShardingPlan,
    batch: Mapping[str, jax.ShapeDtypeStruct] | None,
    platform: str,
    without: Collection[str] = (),
) -> list[Collective]:
    """Every collective of one step, unmerged, from the plan and the model's own account.

    Args:
        model: The model, not split.
        plan: The plan, with the options of the step.
        batch: Global shapes of a batch; a model that splits its own work moves bytes in proportion to it. Without
            them backward counts as reading every parameter of a block, which it need not, and a model's own sums over
            the rows of all devices are left out.
        platform: Where the step runs.
        without: Paths of parameters whose moves are left out: the others move as in the whole step.

    Raises:
        UserError: The shapes of a batch are needed and not given.
    """
    counts = step_counts(as_split(model, plan), plan, batch, platform)
    loss = _look_at_loss(model, plan, batch) if batch is not None else _Loss()
    counts = counts._replace(metrics=loss.metrics)
    moved = plan.without(without) if without else plan
    lines = [line for strategy in STRATEGIES.values() for line in strategy.cost(moved, counts, platform)]
    layouts = [row.layout for row in plan.trained.update_table.rows]
    lines += norm_cost(layouts, plan.summed_axes, plan.options.precision.reduce)
    if batch is not None and loss.couples_rows:
        lines += sums_over_rows(model, plan, batch, platform)
    return [line for line in lines if line.bytes]  # of what has no elements there is nothing to move


def step_counts(
    model: Model | BlockModel, plan: ShardingPlan, batch: Mapping[str, jax.ShapeDtypeStruct] | None, platform: str
) -> StepCounts:
    """What of a step the layouts do not tell; the arguments are those of `step_cost`, the model split."""
    pipeline, options = plan.pipeline, plan.options
    calls = plain_counts(model, options.accumulate)
    if not isinstance(model, BlockModel):
        return StepCounts(calls)
    if pipeline:
        calls = pipeline_counts(model, pipeline.timetable, options.accumulate)
    if batch is None and model.traffic is None and pipeline is None:
        return StepCounts(calls, unread=_unread(model, plan, calls, None, platform))
    shapes = _microbatch(plan, batch)
    sent = sent_at_a_tick(model, plan, shapes, options.precision) if pipeline else ()
    own = tuple(_own(model, plan, calls, shapes, platform))
    return StepCounts(calls, own, sent, unread=_unread(model, plan, calls, shapes, platform))


def _unread(
    model: BlockModel,
    plan: ShardingPlan,
    calls: CallCounts,
    shapes: Mapping[str, jax.ShapeDtypeStruct] | None,
    platform: str,
) -> dict[str, int]:
    """How many of a block's backward calls do not read a parameter; without shapes, of what never runs backward."""
    paths = [row.path for row in plan.table.rows if in_blocks(row.path)]
    before_head = [row.path for row in plan.table.rows if row.path.split("/")[0] != "head"]
    if plan.pipeline is None and plan.frozen.issuperset(before_head):
        return dict.fromkeys(paths, calls.block_again + calls.block_backward)
    if shapes is None or plan.keeps_blocks or not plan.gathers_blocks:
        return {}
    reads = read_again(model, plan, shapes, plan.options.remat, plan.options.precision)
    first = plan.options.accumulate
    if prefetches_blocks(plan) and platform in TRICKS["order"].platforms:  # what waits for a gather reads all of it
        return {path: calls.block_backward - first for path in paths if path not in reads.inner}
    return {
        path: (calls.block_backward - first) * (path not in reads.inner) + first * (path not in reads.first)
        for path in paths
    }


def _microbatch(
    plan: ShardingPlan, batch: Mapping[str, jax.ShapeDtypeStruct] | None
) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of one microbatch on one device, as the model sees it."""
    if batch is None:
        raise UserError("What a step moves depends on the batch here: give its shapes.")
    pieces, compute = plan.rows(plan.options.accumulate).total, plan.options.precision.compute
    rows = jax.eval_shape(lambda batch: cast_inputs(batch, compute), dict(batch))
    return {
        name: jax.ShapeDtypeStruct((leaf.shape[0] // pieces, *leaf.shape[1:]), leaf.dtype)
        for name, leaf in rows.items()
    }


def _look_at_loss(model: Model | BlockModel, plan: ShardingPlan, batch: Mapping[str, jax.ShapeDtypeStruct]) -> _Loss:
    """Traces a loss without a mesh; of a model of blocks, its embedding, one block of its own, and its head."""
    params = abstract_parameters(model, plan.options.precision)
    params = jax.eval_shape(lambda tree: cast_floats(tree, plan.options.precision.compute), params)
    rows, key = _microbatch(plan, batch), jax.eval_shape(lambda: make_key(0))

    def loss(params: Params, rows: Batch, key: Array) -> Any:
        if isinstance(model, BlockModel):  # no block changes what the head counts
            x = model.embed({name: params[name] for name in model.embed_reads}, rows, key)
            if model.parallelize is None:
                one = jax.tree.map(lambda leaf: leaf[0], params["blocks"])
                x = model.block(one, x, fold_block(key, jnp.asarray(0)))
            return model.head({name: params[name] for name in model.head_reads}, x, rows, key)
        state = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract_model_state(model, plan.options.precision)
        )
        return model.loss(params, rows, key, *((state,) if has_state(model) else ()))

    with noticing() as asked:
        try:
            found = jax.eval_shape(lambda *given: as_sums(loss(*given)).metrics, params, rows, key)
        except Exception:  # a model that runs on its mesh alone
            return _Loss()
    return _Loss(len(jax.tree.leaves(found)), bool(asked) or has_state(model))


def sums_over_rows(
    model: Model | BlockModel, plan: ShardingPlan, batch: Mapping[str, jax.ShapeDtypeStruct], platform: str
) -> list[Collective]:
    """What a model whose rows depend on each other sums over all devices by itself, and what makes its state one.

    It is read from the traced program of its loss and gradients, as in `step_cost`, whose arguments these are.
    """
    if plan.pipeline or plan.output_rules or not plan.summed_axes:
        return []
    device_step, mesh, found = DeviceStep(model, plan), plan.mesh, list[Collective]()
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    after = sum_key(plan.summed_axes, plan.options.precision.reduce, platform)

    def look(params: Params, rows: Batch, state: Any) -> Array:
        graph, (*waited_for, _) = trace(device_step.local_sums, params, rows, state)
        first = graph.outputs[: len(jax.tree.leaves(waited_for))]
        found[:] = all_reduces(graph, first, after, sizes=sizes, platform=platform)
        return jnp.zeros(())

    specs = (plan.manual_specs(plan.table), plan.batch_spec, PartitionSpec())
    mapped = over_manual_axes(look, plan, specs, PartitionSpec(), abstract=True)
    state = abstract_model_state(model, plan.options.precision)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncheckedStep)
        jax.eval_shape(mapped, plan.table.abstract_arrays, dict(batch), state)
    return found


def _own(
    model: BlockModel,
    plan: ShardingPlan,
    calls: CallCounts,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    platform: str,
) -> list[Collective]:
    """What the model itself moves: its parts' traffic, times their calls."""
    if model.traffic is None:
        return []
    own: list[Collective] = []
    for part, forward, backward in (
        ("embed", calls.embed, calls.embed_backward),
        ("block", calls.block, calls.block_backward),
        ("head", calls.head, calls.head),
    ):
        moved = model.traffic(part, shapes, plan.options.precision.compute, platform)
        own += [line.times(forward) for line in moved.forward]
        own += [line.times(backward) for line in moved.backward]
        if part == "block":
            own += _recomputed(model, plan, moved, calls, shapes, platform)
    return [as_sent(line, plan.mesh_size(line.axes[-1]), platform) for line in own] if plan.pipeline else own


def _recomputed(
    model: BlockModel,
    plan: ShardingPlan,
    moved: Traffic,
    calls: CallCounts,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    platform: str,
) -> list[Collective]:
    """What blocks move once more: inside backward under `remat`, and in a pipeline's actions that recompute."""
    remat, pipeline = plan.options.remat, plan.pipeline
    inside = moved.again if remat != "none" else ()
    if inside and plan.frozen and remat == "dots" and not (pipeline or prefetches_blocks(plan)):
        inside = all_to_alls_again(model, plan, shapes, plan.options, moved, platform)
    before = moved.again if remat != "full" else ()
    if pipeline and (pipeline.timetable.blocks_per_slot > 1 or recomputes_output(plan, remat)):
        before = moved.forward
    again = [line.times(calls.block_backward) for line in inside]
    return again + [line.times(calls.block_again) for line in before]
