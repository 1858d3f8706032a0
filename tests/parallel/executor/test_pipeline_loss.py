"""The loss of a pipeline composed for a step: what a stage sends at a tick, and evaluations with fewer rows."""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from spmdkit.parallel import Precision, build_step, lay_out
from spmdkit.parallel.blocks.model_parts import ModelParts
from spmdkit.parallel.executor.pipeline_loss import pipeline_loss, run_forward, run_gradients, sent_at_a_tick
from spmdkit.parallel.executor.stage import Inputs
from spmdkit.parallel.model.loss_sums import as_sums
from spmdkit.parallel.pipeline import PipelineConfig, make_pipeline
from spmdkit.parallel.schedule.builders import forwards_only
from spmdkit.parallel.schedule.timetable import make_timetable
from spmdkit.parallel.sharding.stored_order import store_blocks, unstore_blocks
from support import toy
from support.pipelines import ROWS, TOLERANCE, first_params, model, one_device
from support.verification import BLOCK_MODEL

MICROBATCH_ROWS = 2
SHAPES = toy.abstract(toy.batch(0, MICROBATCH_ROWS))


@cache
def plan(schedule="1f1b", size=3):
    pipe = PipelineConfig(size=size, schedule=schedule, microbatches=6)
    return lay_out(replace(BLOCK_MODEL), {"pipe": pipe}, devices=toy.devices(size))


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_activations_of_a_microbatch_go_up_and_their_gradient_down(compute):
    sent = sent_at_a_tick(BLOCK_MODEL, toy.with_options(plan(), precision=Precision(compute=compute)), SHAPES)
    assert [(leaf.shape, leaf.dtype) for leaf in sent] == [((MICROBATCH_ROWS, toy.LENGTH, toy.WIDTH), compute)] * 2


def test_only_gradients_travel_down():
    """Indices of rows go up with the activations, and nothing of them comes back."""
    carrying = replace(
        BLOCK_MODEL,
        embed=lambda groups, batch, key: {"x": BLOCK_MODEL.embed(groups, batch, key), "example": batch["example"]},
        block=lambda params, x, key: {**x, "x": BLOCK_MODEL.block(params, x["x"], key)},
        head=lambda groups, x, batch, key: BLOCK_MODEL.head(groups, x["x"], batch, key),
    )
    sent = sent_at_a_tick(carrying, plan(), SHAPES)
    assert [leaf.dtype for leaf in sent] == ["float32", "int32", "float32"]
    assert sent[1].shape == (MICROBATCH_ROWS,)


def test_has_its_own_backward():
    composed = pipeline_loss(BLOCK_MODEL, plan())
    assert composed.differentiate is not None


@pytest.mark.parametrize("rows", [4, 6, 7])
def test_evaluation_accepts_rows_that_training_rejects(rows):
    """6 microbatches train; the rows of an evaluation are cut into as many as divide them."""
    step = build_step(BLOCK_MODEL, optax.sgd(0.1), plan())
    shapes = jax.eval_shape(step.evaluate, step.abstract_state().params, toy.abstract(toy.batch(0, rows)))
    assert [leaf.shape for leaf in jax.tree.leaves(shapes)] == [(), ()]


class Case(NamedTuple):
    """One pipeline: half of its rows on each of two devices along `data`."""

    schedule: str
    size: int
    layers: int
    microbatches: int = 4
    recompute: bool = False
    tied: bool = False
    dropout: float = 0.0
    given: tuple = ()


CASES = [
    Case("gpipe", 2, 4),
    Case("gpipe", 4, 5, recompute=True),
    Case("1f1b", 2, 3, tied=True, dropout=0.1),
    Case("1f1b", 4, 4, microbatches=8),
    Case("1f1b", 2, 4, recompute=True),
    Case("1f1b", 2, 3, given=(3, 0)),  # the last stage has the head alone
    Case("interleaved_1f1b", 2, 5, tied=True),
    Case("interleaved_1f1b", 4, 8, recompute=True),
    Case("zb_h1", 2, 4, dropout=0.1),
    Case("zb_h1", 4, 6, microbatches=8, recompute=True),
    Case("zbv", 2, 4, tied=True, dropout=0.1, recompute=True),
    Case("zbv", 4, 9, microbatches=8),
]


def parts_of(model):
    """The model in parts, with nothing to gather."""
    return ModelParts(
        embed=lambda groups, whole, batch, key: model.embed(groups, batch, key),
        block=lambda params, whole, x, key: model.block(params, x, key),
        head=lambda groups, whole, x, batch, key: as_sums(model.head(groups, x, batch, key)),
        embed_reads=model.embed_reads,
        head_reads=model.head_reads,
    )


def pipelined(model, config):
    """(stored parameters, batch, key, fill) -> gradients and sums of training, sums of evaluation; all global."""
    pipeline = make_pipeline(config, model.num_blocks)
    forwards = make_timetable(forwards_only(pipeline.schedule, pipeline.schedule.microbatches), pipeline.stages)
    axes, parts = ("pipe", "data"), parts_of(model)
    devices = jax.devices()[: 2 * config.size]
    mesh = jax.make_mesh((config.size, 2), axes, axis_types=(AxisType.Auto,) * 2, devices=devices)
    specs = {"embed": PartitionSpec(), "blocks": PartitionSpec("pipe"), "head": PartitionSpec()}

    def local(params, batch, key, fill):
        split = {name: ("data",) if name == "blocks" else axes for name in params}
        varying = {
            name: jax.tree.map(lambda leaf, name=name: lax.pcast(leaf, split[name], to="varying"), group)
            for name, group in params.items()
        }
        inputs = Inputs(varying, {}, batch, key)
        gradients, sums = run_gradients(parts, pipeline.timetable, inputs, axes=axes, fill=fill)
        evaluated = run_forward(parts, forwards, inputs, axes=axes, fill=fill)
        summed = {
            name: jax.tree.map(lambda leaf, name=name: lax.psum(leaf, split[name]), group)
            for name, group in gradients.items()
        }
        return summed, lax.psum(sums[:2], axes), lax.psum(evaluated[:2], axes)

    in_specs = (specs, PartitionSpec("data"), PartitionSpec(), PartitionSpec())
    out_specs = (specs, PartitionSpec(), PartitionSpec())
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True))

    def run(params, batch, key, fill):
        stored = {**params, "blocks": store_blocks(params["blocks"], pipeline.stages)}
        gradients, sums, evaluated = mapped(stored, batch, key, fill)
        return {**gradients, "blocks": unstore_blocks(gradients["blocks"], pipeline.stages)}, sums, evaluated

    return run


@cache
def pipeline_of(case):
    """fill -> (gradients, sums of training, sums of evaluation); compiled once."""
    which = case.layers, case.tied, case.dropout
    given = first_params(*which), toy.batch(3, ROWS), jax.random.key(1) if case.dropout else None
    run = pipelined(model(*which), config(case))
    return lambda fill: run(*given, fill)


def config(case):
    return PipelineConfig(
        size=case.size,
        schedule=case.schedule,
        microbatches=case.microbatches,
        recompute=case.recompute,
        layers=case.given,
    )


def marked(number, case):
    """Each schedule is once in the quick tests; the others are slow for their number."""
    again = case.schedule in [each.schedule for each in CASES[:number]]
    name = f"{case.schedule}-{case.size}-{case.layers}"
    return pytest.param(case, id=name, marks=[pytest.mark.slow] if again else [])


@pytest.mark.slow_cases("1f1b-2-3_0", "gpipe-2-4", "interleaved_1f1b-2-5", "zb_h1-2-4", "zbv-2-4")
@pytest.mark.parametrize("case", [marked(number, case) for number, case in enumerate(CASES)])
def test_every_schedule_equals_one_device(float64, case):
    """Loss, every gradient and the forward-only loss; and the same bits where every empty place holds NaN."""
    sums_of_one, expected = one_device(case.layers, case.tied, case.dropout)
    gradients, *sums = pipeline_of(case)(0.0)
    errors = jax.tree.map(toy.relative, gradients, expected)
    assert max(jax.tree.leaves(errors)) < TOLERANCE, errors
    for found in sums:
        np.testing.assert_allclose(found, sums_of_one, rtol=TOLERANCE)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, pipeline_of(case)(jnp.nan), (gradients, *sums)))


@pytest.mark.slow
def test_schedules_agree_to_the_bit(float64):
    """All go through the microbatches in the same order, so even the roundings are the same."""
    cases = [Case(name, 2, 4) for name in ("gpipe", "1f1b", "zb_h1", "zbv")] + [Case("1f1b", 2, 4, recompute=True)]
    first, *others = (pipeline_of(case)(0.0) for case in cases)
    for case, found in zip(cases[1:], others, strict=True):
        assert jax.tree.all(jax.tree.map(jnp.array_equal, found, first)), case
