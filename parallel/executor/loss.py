"""The loss of one device of a pipeline and its gradients, in the form of `blocks/forward.py`, and what it sends."""

from collections.abc import Mapping
from math import gcd
from typing import Any

import jax
from jax import Array

from ..blocks.activations import on_activations
from ..blocks.differentiable import split_differentiable
from ..blocks.forward import Kept, LocalLoss, carriers_of, keep_for_step
from ..blocks.model_parts import make_parts
from ..model import Activations, Batch, BlockModel, Params
from ..model.loss_sums import LossSums
from ..plan import ShardingPlan
from ..precision import Precision
from ..schedule.forwards import forwards_only
from ..schedule.timetable import Pipeline, make_timetable
from .run import run_forward, run_gradients
from .stage import Inputs


def pipeline_loss(model: BlockModel, plan: ShardingPlan, *, remat: str, precision: Precision) -> LocalLoss:
    """Composes a model in stages with the gathering of its parameters.

    Args:
        model: The model, split over the axes inside it.
        plan: Where its parameters and gradients live; `plan.pipeline` is the pipeline.
        remat: What blocks keep for backward: `none` leaves it to `blocks/split_backward.py`.
        precision: The compute and reduce dtypes.
    """
    pipeline = plan.pipeline
    assert pipeline is not None
    parts = make_parts(model, plan, remat=remat, precision=precision)

    def loss(shards: Params, kept: Kept, batch: Batch, key: Array | None, state: Any) -> LossSums:
        timetable = _of_forwards(pipeline, batch)
        return run_forward(parts, timetable, Inputs(shards, kept, batch, key), axes=plan.manual_axes)

    def differentiate(
        shards: Params, kept: Kept, batch: Batch, key: Array | None, state: Any, scale: Array | None
    ) -> tuple[LossSums, Params]:
        inputs = Inputs(shards, kept, batch, key, scale)
        gradients, sums = run_gradients(parts, pipeline.timetable, inputs, axes=plan.manual_axes)
        return sums, gradients

    return LocalLoss(keep_for_step(plan, precision), carriers_of(plan), loss, differentiate)


def _of_forwards(pipeline: Pipeline, batch: Batch) -> Any:
    """A timetable of forwards; an evaluation's rows may not be divisible by the microbatches of training."""
    rows = next(iter(batch.values())).shape[0]
    schedule = forwards_only(pipeline.schedule, gcd(rows, pipeline.schedule.microbatches))
    return make_timetable(schedule, pipeline.stages)


def sent_at_a_tick(
    model: BlockModel, plan: ShardingPlan, microbatch: Mapping[str, jax.ShapeDtypeStruct], precision: Precision
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What a stage sends at every tick: one microbatch's activations up, and what goes down, as a device holds them.

    Args:
        model: The model, split over the axes inside it.
        plan: Where its parameters live.
        microbatch: Per-device shapes of one microbatch.
        precision: The dtypes.
    """
    assert plan.pipeline is not None

    def shapes(_: Params, x: Activations) -> Activations:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), x)

    differentiable, others = split_differentiable(on_activations(shapes, model, plan, microbatch, precision))
    down = [*differentiable, *others] if plan.pipeline.timetable.both_ways else differentiable
    return tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in (*differentiable, *others, *down))
