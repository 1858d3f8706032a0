"""Pipelines beside other strategies, what they hold, how their state is saved, and what does not fit."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.parallel import FSDPConfig, census, verify
from spmdkit.parallel.data import DataParallelConfig
from spmdkit.parallel.pipeline import PipelineConfig, make_pipeline
from spmdkit.parallel.step.model_order import abstract_in_model_order, in_model_order, in_stored_order
from support import toy
from support.pipelines import light

SPLIT = PipelineConfig(size=2, schedule="zbv", microbatches=4, embed_and_head="split")
FSDP = FSDPConfig(size=2, floor_bytes=256)


@pytest.mark.long
def test_embedding_and_head_split_over_stages_train_like_one_device():
    strategy = {"pipe": SPLIT, "fsdp": FSDP, "data": DataParallelConfig(size=2, zero=1)}
    result = verify(light(5), strategy, [toy.batch(0), toy.batch(1)], devices=toy.devices(8), clip_norm=0.05)
    assert result.ok, str(result)


def test_microbatches_are_twice_the_stages_by_default():
    assert make_pipeline(PipelineConfig(size=4), 8).schedule.microbatches == 8


@cache
def temporary_bytes(schedule, microbatches, recompute=False):
    """Compiled memory of a step on 4 stages, with so many microbatches of 2 rows each."""
    pipe = PipelineConfig(size=4, schedule=schedule, microbatches=microbatches, recompute=recompute)
    own = light(8)
    step = toy.build({"pipe": pipe}, model=own)
    rows = jax.ShapeDtypeStruct((2 * microbatches, 128), jnp.int32)
    batch = dict.fromkeys(("inputs", "targets"), rows) | {"weights": jax.ShapeDtypeStruct(rows.shape, jnp.float32)}
    return step.compile(batch).memory_analysis().temp_size_in_bytes


@pytest.mark.long
def test_memory_follows_the_schedule():
    """1F1B holds as much for 64 microbatches as for 8, but for the timetable; GPipe holds each of them."""
    assert temporary_bytes("1f1b", 64) < 1.02 * temporary_bytes("1f1b", 8)
    assert temporary_bytes("zb_h1", 64) < 1.02 * temporary_bytes("zb_h1", 8)
    assert temporary_bytes("gpipe", 64) > 5 * temporary_bytes("1f1b", 64)
    assert temporary_bytes("1f1b", 8, recompute=True) < 0.8 * temporary_bytes("1f1b", 8)


def test_a_schedule_recomputes_all_or_nothing(tmp_path):
    """Stage 1 would keep nothing of its forwards, and read what nobody wrote."""
    path = tmp_path / "mine.csv"
    path.write_text("F0,F1,R0,B0,W0,R1,B1,W1\n,F0,B0,F1,B1,W0,W1,\n")
    strategy = {"pipe": {"size": 2, "schedule": str(path), "microbatches": 2}}
    with pytest.raises(ValueError, match=r"2 of 4 forwards are recomputed \(R\).*Add the 2 missing R"):
        toy.plan(strategy)


def test_rules_leave_the_stages_to_the_pipeline():
    rules = {"blocks/up": (None, None, None), "head/.*": ("pipe", None)}
    with pytest.raises(ValueError) as error:
        toy.plan({"pipe": 2}, rules=rules)
    assert "Start this rule in layouts.rules with pipe" in str(error.value)
    assert "Leave pipe out of this rule" in str(error.value)


@pytest.mark.slow_cases("adafactor", "adamw")
@pytest.mark.parametrize(
    "optimizer", [optax.adamw(1e-3), optax.adafactor(1e-3, min_dim_size_to_factor=16)], ids=["adamw", "adafactor"]
)
def test_state_is_saved_in_the_models_order(optimizer):
    """Parameters, moments of their shape and factored ones; what fills up a stage is not saved, and not counted."""
    own = light(5)
    pipe = PipelineConfig(size=2, schedule="interleaved_1f1b", microbatches=4)
    step = toy.build({"pipe": pipe, "data": 2}, optimizer, own)
    state, layouts = step.init(seed=0), step.plan
    saved = in_model_order(state)
    expected = jax.jit(own.init)(jax.random.key(0))
    assert jax.tree.all(
        jax.tree.map(lambda ours, theirs: bool((np.asarray(ours) == theirs).all()), saved.params, expected)
    )
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), jax.eval_shape(optimizer.init, expected))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), saved.opt_state) == shapes
    abstract = abstract_in_model_order(step.abstract_state())
    for promised, given in zip(jax.tree.leaves(abstract), jax.tree.leaves(saved), strict=True):
        assert (promised.shape, promised.dtype, promised.sharding) == (given.shape, given.dtype, given.sharding)
    restored = in_stored_order(saved, step.abstract_state())
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert ours.sharding == theirs.sharding
        np.testing.assert_array_equal(ours, theirs)
    assert layouts.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(expected)) < layouts.table.num_elements


@pytest.mark.slow_cases("microbatch")
@pytest.mark.parametrize("scatter", ["step", "microbatch"])
def test_fsdp_scatters_gradients_once_or_for_each_microbatch(scatter):
    """2 stages of 2 blocks and 4 microbatches, counted in the compiled program."""
    own, pipe = light(4), PipelineConfig(size=2, microbatches=4, scatter=scatter)
    step = toy.build({"pipe": pipe, "fsdp": FSDP}, model=own)
    found, plan = census(step.compile(toy.abstract(toy.batch(0))).as_text(), step.plan.mesh), step.plan
    (line,) = (line for line in found if line.kind == "reduce-scatter")
    sharded = [row.path for row in plan.table.rows if "fsdp" in row.layout.used_axes]
    blocks = sum(path.startswith("blocks/") for path in sharded)
    assert blocks > 0
    assert line.count == (len(sharded) if scatter == "step" else 4 * (2 * blocks + len(sharded) - blocks))
