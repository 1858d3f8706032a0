"""The loss of a pipeline composed for a step: what a stage sends at a tick, and evaluations with fewer rows."""

from dataclasses import replace
from functools import cache

import jax
import optax
import pytest
from spmdkit.parallel import Precision, build_step
from spmdkit.parallel.executor.pipeline_loss import sent_in_a_step
from spmdkit.parallel.pipeline import PipelineConfig
from spmdkit.parallel.schedule.schedule_table import Kind
from support import toy
from support.verification import BLOCK_MODEL

MICROBATCH_ROWS = 2
SHAPES = toy.abstract(toy.batch(0, MICROBATCH_ROWS))


@cache
def plan(schedule="1f1b", size=3):
    pipe = PipelineConfig(size=size, schedule=schedule, microbatches=6)
    return toy.plan({"pipe": pipe}, replace(BLOCK_MODEL))


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_activations_of_a_microbatch_go_up_and_their_gradient_down(compute):
    sent = sent_in_a_step(BLOCK_MODEL, toy.with_options(plan(), precision=Precision(compute=compute)), SHAPES, "cpu")
    ticks = plan().pipeline.schedule.num_ticks
    expected = ((MICROBATCH_ROWS, toy.LENGTH, toy.WIDTH), compute, ticks)
    assert [(leaf.shape, leaf.dtype, times) for leaf, times in sent] == [expected] * 2


def test_gpus_send_only_what_is_read():
    """6 microbatches on 3 stages: the steady ticks of 1f1b, three for each microbatch, send up in two of three."""
    schedule = plan().pipeline.schedule
    (_, up), (_, down) = sent_in_a_step(BLOCK_MODEL, plan(), SHAPES, "cuda")

    def ticks(kind, stages):
        return len({tick for tick, stage, action in schedule.actions() if action.kind == kind and stage in stages})

    assert (up, down) == (ticks(Kind.FORWARD, (0, 1)), ticks(Kind.BACKWARD_INPUT, (1, 2)))
    assert max(up, down) < schedule.num_ticks


def test_only_gradients_travel_down():
    """Indices of rows go up with the activations, and nothing of them comes back."""
    carrying = replace(
        BLOCK_MODEL,
        embed=lambda groups, batch, key: {"x": BLOCK_MODEL.embed(groups, batch, key), "example": batch["example"]},
        block=lambda params, x, key: {**x, "x": BLOCK_MODEL.block(params, x["x"], key)},
        head=lambda groups, x, batch, key: BLOCK_MODEL.head(groups, x["x"], batch, key),
    )
    sent = [leaf for leaf, _ in sent_in_a_step(carrying, plan(), SHAPES, "cpu")]
    assert [leaf.dtype for leaf in sent] == ["float32", "int32", "float32"]
    assert sent[1].shape == (MICROBATCH_ROWS,)


@pytest.mark.parametrize("rows", [4, 6, 7])
def test_evaluation_accepts_rows_that_training_rejects(rows):
    """6 microbatches train; the rows of an evaluation are cut into as many as divide them."""
    step = build_step(BLOCK_MODEL, optax.sgd(0.1), plan())
    shapes = jax.eval_shape(step.evaluate, step.abstract_state().params, toy.abstract(toy.batch(0, rows)))
    assert [leaf.shape for leaf in jax.tree.leaves(shapes)] == [(), ()]


def test_evaluation_reads_every_row():
    """7 rows are 7 microbatches or one, not 6."""
    step = build_step(BLOCK_MODEL, optax.sgd(0.1), plan(size=2))
    batch = toy.batch(0, 7)
    assert step.measure(step.init(0).params, batch).weight == pytest.approx(batch["weights"].sum())
