"""What one step moves, as the strategies predict it: nothing runs, nothing is compiled.

counts = what the layouts do not tell: how often the model runs, what it moves by itself
lines  = every strategy's cost, in turn, and the reduction of the norm
"""

from collections.abc import Mapping

import jax

from ...mesh.errors import UserError
from ..blocks.model_parts import recomputes_output
from ..collectives import CallCounts, Collective, StepCounts, Traffic
from ..executor.loss import sent_at_a_tick
from ..model import BlockModel, Model
from ..plan import ShardingPlan
from ..precision import cast_inputs
from ..sharding.strategies import STRATEGIES
from ..xla.neighbours import as_sent
from .call_counts import pipeline_counts, plain_counts
from .composition import as_split
from .gradients import norm_cost


def step_cost(
    model: Model | BlockModel, plan: ShardingPlan, batch: Mapping[str, jax.ShapeDtypeStruct] | None, platform: str
) -> list[Collective]:
    """Every collective of one step, unmerged, from the plan and the model's own account.

    Args:
        model: The model, not split.
        plan: The plan, with the options of the step.
        batch: Global shapes of a batch; a model that splits its own work moves bytes in proportion to it.
        platform: Where the step runs.

    Raises:
        UserError: The shapes of a batch are needed and not given.
    """
    counts = step_counts(as_split(model, plan), plan, batch, platform)
    lines = [line for strategy in STRATEGIES.values() for line in strategy.cost(plan, counts, platform)]
    layouts = [row.layout for row in plan.update_table.rows]
    return lines + norm_cost(layouts, plan.summed_axes, plan.options.precision.reduce)


def step_counts(
    model: Model | BlockModel, plan: ShardingPlan, batch: Mapping[str, jax.ShapeDtypeStruct] | None, platform: str
) -> StepCounts:
    """What of a step the layouts do not tell; the arguments are those of `step_cost`, the model split."""
    pipeline, options = plan.pipeline, plan.options
    if not isinstance(model, BlockModel) or (model.traffic is None and pipeline is None):
        return StepCounts(plain_counts(model, options.accumulate))
    calls = plain_counts(model, options.accumulate)
    if pipeline:
        calls = pipeline_counts(model, pipeline.timetable, options.accumulate)
    shapes = _microbatch(plan, batch)
    sent = sent_at_a_tick(model, plan, shapes, options.precision) if pipeline else ()
    return StepCounts(calls, tuple(_own(model, plan, calls, shapes, platform)), sent)


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
            own += _recomputed(plan, moved, calls)
    return [as_sent(line, plan.mesh_size(line.axes[-1]), platform) for line in own] if plan.pipeline else own


def _recomputed(plan: ShardingPlan, moved: Traffic, calls: CallCounts) -> list[Collective]:
    """What blocks move once more: inside backward under `remat`, and in a pipeline's actions that recompute."""
    remat, pipeline = plan.options.remat, plan.pipeline
    inside = moved.again if remat != "none" else ()
    before = moved.again if remat != "full" else ()
    if pipeline and (pipeline.timetable.blocks_per_slot > 1 or recomputes_output(plan, remat)):
        before = moved.forward
    again = [line.times(calls.block_backward) for line in inside]
    return again + [line.times(calls.block_again) for line in before]
