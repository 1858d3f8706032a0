"""The loss of a pipeline on one device, and its executor: one loop over the ticks of a timetable.

All stages run the same program. A tick has the following parts. A stage's entry in the timetable determines how often
it runs each part; it skips the others:

    embed              once        in F or R of the first virtual stage
    forward            per block   in F
    recompute          per block   in R: recomputes the residuals of forward (for a single block, only these)
    head               once        in B of the last virtual stage: forward and backward of the head
    backward_input     per block   in B
    backward_weight    per block   in W
    embed's gradient   once        in B of the first virtual stage

One message passes through them. Each part returns it unchanged, or replaces it with its result, or with zeros if there
is nothing left to send. At the end of the tick, every stage sends it to both neighbors, whether or not they need it,
and puts what it receives into its inbox.

How a stage skips a part depends on the platform, see `xla/optional_turns.py`. In both ways, stages with unequal numbers
of blocks run without padding.

Collectives inside a part (of FSDP or tensor) run over the devices of one stage. These devices read the same entry, run
the same number of turns, and therefore call the same collectives in the same order.
"""

from collections.abc import Mapping
from functools import partial
from math import gcd
from typing import Any

import jax
from jax import Array, lax

from ...layouts.paths import join
from ..blocks.forward import Kept, LocalLoss, carriers, keep_for_step
from ..blocks.model_parts import make_parts, on_activations
from ..fsdp import scatter, whole_carriers
from ..model import Activations, Batch, BlockModel, Params, split_differentiable
from ..model.loss_sums import LossSums
from ..plan import ShardingPlan
from ..schedule.builders import forwards_only
from ..schedule.schedule_table import Kind
from ..schedule.timetable import Entry, make_timetable
from .stage import Stage, State
from .tick import Message, Tick, count_sends, exchange, take


def pipeline_loss(model: BlockModel, plan: ShardingPlan) -> LocalLoss:
    """Combines a model in stages with the gathering of its parameters.

    Args:
        model: The model, split over the axes inside it.
        plan: A plan with a pipeline, and the options of the step.
    """
    pipeline = plan.pipeline
    assert pipeline is not None
    stage = partial(Stage, make_parts(model, plan), plan.manual_axes)

    def loss(shards: Params, kept: Kept, batch: Batch, key: Array | None, state: Any) -> LossSums:
        rows = next(iter(batch.values())).shape[0]  # of an evaluation, which training's microbatches may not divide
        schedule = forwards_only(pipeline.schedule, gcd(rows, pipeline.schedule.microbatches))
        return run_forward(stage(make_timetable(schedule, pipeline.stages), shards, kept, batch, key))

    def differentiate(
        shards: Params, kept: Kept, batch: Batch, key: Array | None, state: Any, scale: Array | None
    ) -> tuple[LossSums, Params]:
        layouts, precision = plan.trained.gradient_table.layouts, plan.options.precision
        if plan.scatters_once:
            kept = kept if plan.keeps_blocks else {**kept, "blocks": join(kept["blocks"], shards["blocks"])}
            shards = whole_carriers(shards, layouts, plan.gather_axes)
        gradients, sums = run_gradients(stage(pipeline.timetable, shards, kept, batch, key, scale))
        if plan.scatters_once:
            gradients = scatter(gradients, layouts, plan.gather_axes, precision)
        return sums, gradients

    return LocalLoss(partial(keep_for_step, plan), partial(carriers, plan), loss, differentiate)


def sent_in_a_step(
    model: BlockModel, plan: ShardingPlan, microbatch: Mapping[str, jax.ShapeDtypeStruct], platform: str
) -> tuple[tuple[jax.ShapeDtypeStruct, int], ...]:
    """Returns the per-device arrays that stages send in one run of the timetable, and how often they send each.

    They are activations up and gradients down.

    Args:
        model: The model, split over the axes inside it.
        plan: A plan with a pipeline, and the options of the step.
        microbatch: The per-device shapes of one microbatch.
        platform: Where the step runs; it determines whether all neighbors exchange messages in each tick, see
            `run_ticks`.
    """
    assert plan.pipeline is not None
    timetable = plan.pipeline.timetable

    def shapes(_: Params, x: Activations) -> Activations:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), x)

    differentiable, others = split_differentiable(on_activations(shapes, model, plan, microbatch))
    messages = [*differentiable, *others], [*differentiable, *(others if timetable.both_ways else [])]
    return tuple(
        (leaf, times)
        for message, times in zip(messages, count_sends(timetable, platform), strict=True)
        for leaf in message
    )


def run_gradients(stage: Stage) -> tuple[Params, LossSums]:
    """Runs the timetable of a complete schedule, forwards and backwards. Inside `shard_map`.

    Returns:
        Gradients like the parameters, summed over the microbatches of this device (for the groups outside the blocks,
        each stage has its own part), and this device's share of the sums, 0 except on the stage that runs the head.
    """
    timetable = stage.timetable

    def run(state: State, entry: Entry) -> tuple[State, None]:
        tick = Tick(entry, timetable)
        inbox, residuals, deferred, gradients, sums = state
        message = stage.embed(tick, take(inbox, entry.reads))
        if timetable.recomputes:
            message, _ = stage.forward(tick, Kind.FORWARD, message, ())
            message, residuals = stage.recompute(tick, message, residuals)
        else:
            message, residuals = stage.forward(tick, Kind.FORWARD, message, residuals)
        message, gradients, sums = stage.head_backward(tick, message, gradients, sums)
        message, deferred = stage.backward_input(tick, message, residuals, deferred)
        gradients = stage.backward_weight(tick, residuals, deferred, gradients)
        message, gradients = stage.embed_backward(tick, message, gradients)
        inbox = exchange(timetable, entry, inbox, message)
        return State(inbox, residuals, deferred, gradients, sums), None

    state, _ = lax.scan(run, stage.start(), stage.entries())
    return state.gradients, state.sums


def run_forward(stage: Stage) -> LossSums:
    """Runs a timetable of forwards. Inside `shard_map`.

    Returns:
        This device's share of the sums, 0 except on the stage that runs the head.
    """

    def run(state: tuple[Message, LossSums], entry: Entry) -> tuple[Any, None]:
        tick = Tick(entry, stage.timetable)
        inbox, sums = state
        message, _ = stage.forward(tick, Kind.FORWARD, stage.embed(tick, take(inbox, entry.reads)), ())
        message, sums = stage.head_forward(tick, message, sums)
        return (exchange(stage.timetable, entry, inbox, message), sums), None

    (_, sums), _ = lax.scan(run, (stage.new_inbox(), stage.no_sums()), stage.entries())
    return sums
