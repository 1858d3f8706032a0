"""The loss of a pipeline composed for a step: its permutes are what they cost, and evaluations may have fewer rows."""

from dataclasses import replace
from functools import cache

import jax
import optax
import pytest
import toy
from planted import BLOCK_MODEL
from spmdkit.parallel import Precision, build_step, lay_out
from spmdkit.parallel.collectives import Collective
from spmdkit.parallel.executor.loss import pipeline_cost, pipeline_loss
from spmdkit.parallel.pipeline import PipelineConfig

ROWS = 2
"""Of a microbatch."""


@cache
def plan(schedule="1f1b"):
    pipe = PipelineConfig(size=3 if schedule == "1f1b" else 1, schedule=schedule, microbatches=6)
    return lay_out(BLOCK_MODEL, {"pipe": pipe}, devices=toy.devices(pipe.size))


@pytest.mark.parametrize(("compute", "platform", "width"), [("float32", "cpu", 4), ("bfloat16", "gpu", 2)])
def test_two_permutes_of_a_microbatch_at_every_tick(compute, platform, width):
    shapes = toy.abstract(toy.batch(0, ROWS))
    precision = Precision(compute=compute)
    (line,) = pipeline_cost(BLOCK_MODEL, plan(), shapes, precision, 2, platform=platform)
    ticks = 2 * len(plan().pipeline.timetable.entries.kind)  # the schedule runs twice
    size = ROWS * toy.LENGTH * toy.WIDTH * width
    assert line == Collective("collective-permute", ("pipe",), 2 * ticks, 2 * ticks * size)


def test_only_what_has_a_gradient_travels_down():
    """Indices of rows go up with the activations, and nothing of them comes back."""
    carrying = replace(
        BLOCK_MODEL,
        embed=lambda groups, batch, key: {"x": BLOCK_MODEL.embed(groups, batch, key), "example": batch["example"]},
        block=lambda params, x, key: {**x, "x": BLOCK_MODEL.block(params, x["x"], key)},
        head=lambda groups, x, batch, key: BLOCK_MODEL.head(groups, x["x"], batch, key),
    )
    shapes = toy.abstract(toy.batch(0, ROWS))
    (plain,) = pipeline_cost(BLOCK_MODEL, plan(), shapes, Precision(), 1, platform="cpu")
    (line,) = pipeline_cost(carrying, plan(), shapes, Precision(), 1, platform="cpu")
    ticks = len(plan().pipeline.timetable.entries.kind)
    assert line.count == plain.count + ticks
    assert line.bytes == plain.bytes + ticks * ROWS * 4


def test_it_is_differentiated_by_its_own_backward():
    composed = pipeline_loss(BLOCK_MODEL, plan(), remat="none", precision=Precision())
    assert composed.differentiate is not None


@pytest.mark.parametrize("rows", [4, 6, 7])
def test_an_evaluation_takes_rows_that_training_could_not(rows):
    """6 microbatches train; the rows of an evaluation are cut into as many as divide them."""
    step = build_step(BLOCK_MODEL, optax.sgd(0.1), plan())
    shapes = jax.eval_shape(step.evaluate, step.abstract_state().params, toy.abstract(toy.batch(0, rows)))
    assert [leaf.shape for leaf in jax.tree.leaves(shapes)] == [(), ()]
