"""Pipelines beside other strategies, what they hold, how their state is saved, and what does not fit."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from spmdkit.parallel import FSDPConfig, Precision, build_step, lay_out, verify
from spmdkit.parallel.collectives import StepCounts
from spmdkit.parallel.data import DataParallelConfig
from spmdkit.parallel.pipeline import PipelineConfig, begin, cost, finish
from spmdkit.parallel.plan import StepOptions
from spmdkit.parallel.sharding.batch_rows import check_rows
from spmdkit.parallel.sharding.stored_order import stored_order
from spmdkit.parallel.step.cost import count_calls
from support import toy
from support.pipelines import light
from support.verification import BLOCK_MODEL

SPLIT = PipelineConfig(size=2, schedule="zbv", microbatches=4, embed_and_head="split")
FSDP = FSDPConfig(size=2, floor_bytes=256)


@pytest.mark.long
def test_embedding_and_head_split_over_stages_train_like_one_device():
    strategy = {"pipe": SPLIT, "fsdp": FSDP, "data": DataParallelConfig(size=2, zero=1)}
    result = verify(light(5), strategy, [toy.batch(0), toy.batch(1)], devices=toy.devices(8), clip_norm=0.05)
    assert result.ok, str(result)


@cache
def temporary_bytes(schedule, microbatches, recompute=False):
    """Compiled memory of a step on 4 stages, with so many microbatches of 2 rows each."""
    pipe = PipelineConfig(size=4, schedule=schedule, microbatches=microbatches, recompute=recompute)
    own = light(8)
    step = build_step(own, optax.sgd(1.0), lay_out(own, {"pipe": pipe}, devices=toy.devices(4)))
    rows = jax.ShapeDtypeStruct((2 * microbatches, 128), jnp.int32)
    batch = dict.fromkeys(("inputs", "targets"), rows) | {"weights": jax.ShapeDtypeStruct(rows.shape, jnp.float32)}
    return step.compile(batch).memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_follows_the_schedule():
    """1F1B holds as much for 64 microbatches as for 8, but for the timetable; GPipe holds each of them."""
    assert temporary_bytes("1f1b", 64) < 1.02 * temporary_bytes("1f1b", 8)
    assert temporary_bytes("zb_h1", 64) < 1.02 * temporary_bytes("zb_h1", 8)
    assert temporary_bytes("gpipe", 64) > 5 * temporary_bytes("gpipe", 8)
    assert temporary_bytes("1f1b", 8, recompute=True) < 0.8 * temporary_bytes("1f1b", 8)


@pytest.mark.parametrize(
    ("strategy", "plain", "messages"),
    [
        ({"pipe": 2}, True, ["strategy.pipe=2", "one function", "BlockModel (embed, block, head)"]),
        ({"pipe": 4}, False, ["model.layers=3", "4 stages", "strategy.pipe.size"]),
        ({"pipe": {"size": 2, "microbatches": 1}}, False, ["strategy.pipe.microbatches=1", "strategy.pipe.size=2"]),
        ({"pipe": {"size": 2, "schedule": "1f1"}}, False, ["1f1", "1f1b"]),
        ({"pipe": {"size": 2, "layers": [1, 1]}}, False, ["strategy.pipe.layers=[1, 1]", "model.layers=3"]),
        (
            {"pipe": {"size": 2, "embed_and_head": "first"}},
            False,
            ["embed_and_head='first' must be 'whole' or 'split'"],
        ),
        ({"pipe": {"size": 2, "chunks": 2}}, False, ["strategy.pipe.chunks: unknown option"]),
    ],
)
def test_rejects_invalid_pipelines(strategy, plain, messages):
    with pytest.raises(ValueError) as error:
        lay_out(
            toy.PLAIN_MODEL if plain else toy.BLOCK_MODEL,
            strategy,
            devices=toy.devices(4)[: 4 if 4 in strategy.values() else 2],
        )
    for message in messages:
        assert message in str(error.value)


def test_a_schedule_recomputes_all_or_nothing(tmp_path):
    """Stage 1 would keep nothing of its forwards, and read what nobody wrote."""
    path = tmp_path / "mine.csv"
    path.write_text("F0,F1,R0,B0,W0,R1,B1,W1\n,F0,B0,F1,B1,W0,W1,\n")
    strategy = {"pipe": {"size": 2, "schedule": str(path), "microbatches": 2}}
    with pytest.raises(ValueError, match=r"2 of 4 forwards are recomputed \(R\).*Add the 2 missing R"):
        lay_out(toy.BLOCK_MODEL, strategy, devices=toy.devices(2))


def test_rules_leave_the_stages_to_the_pipeline():
    rules = {"blocks/up": (None, None, None), "head/.*": ("pipe", None)}
    with pytest.raises(ValueError) as error:
        lay_out(toy.BLOCK_MODEL, {"pipe": 2}, rules=rules, devices=toy.devices(2))
    assert "Start this rule in layouts.rules with pipe" in str(error.value)
    assert "Leave pipe out of this rule" in str(error.value)


def test_rejects_splitting_embed_and_head_with_zero2():
    strategy = {"pipe": {"size": 2, "embed_and_head": "split"}, "data": {"size": 2, "zero": 2}}
    with pytest.raises(ValueError, match=r"strategy.pipe.embed_and_head=split.*strategy.data.zero=2.*to 1, or"):
        lay_out(toy.BLOCK_MODEL, strategy, devices=toy.devices(4))


@pytest.mark.slow_cases("adafactor", "adamw")
@pytest.mark.parametrize(
    "optimizer", [optax.adamw(1e-3), optax.adafactor(1e-3, min_dim_size_to_factor=16)], ids=["adamw", "adafactor"]
)
def test_state_is_saved_in_the_models_order(optimizer):
    """Parameters, moments of their shape and factored ones; what fills up a stage is not saved, and not counted."""
    own = light(5)
    pipe = PipelineConfig(size=2, schedule="interleaved_1f1b", microbatches=4)
    layouts = lay_out(own, {"pipe": pipe, "data": 2}, devices=toy.devices(4))
    step = build_step(own, optimizer, layouts)
    state, order = step.init(seed=0), stored_order(layouts)
    saved = order.to_model(state)
    expected = jax.jit(own.init)(jax.random.key(0))
    assert jax.tree.all(
        jax.tree.map(lambda ours, theirs: bool((np.asarray(ours) == theirs).all()), saved.params, expected)
    )
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), jax.eval_shape(optimizer.init, expected))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), saved.opt_state) == shapes
    abstract = order.abstract_model(step.abstract_state())
    for promised, given in zip(jax.tree.leaves(abstract), jax.tree.leaves(saved), strict=True):
        assert (promised.shape, promised.dtype, promised.sharding) == (given.shape, given.dtype, given.sharding)
    restored = order.to_stored(saved, step.abstract_state())
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert ours.sharding == theirs.sharding
        np.testing.assert_array_equal(ours, theirs)
    assert layouts.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(expected)) < layouts.table.num_elements


def test_rows_have_to_be_divisible_by_microbatches():
    layouts = lay_out(toy.BLOCK_MODEL, {"pipe": 2, "data": 2}, devices=toy.devices(4))
    check_rows(layouts, 16)  # 2 x 2 microbatches by default
    with pytest.raises(ValueError, match=r"strategy.pipe.microbatches 4.*12 % 8 = 4.*\(16 is the nearest\)"):
        check_rows(layouts, 12)


# Embedding and head split over the stages between steps

ELEMENTS = toy.VOCABULARY * toy.WIDTH
"""Of the table, and as many of the head."""


@cache
def split_plan(embed_and_head="split"):
    pipe = PipelineConfig(size=2, microbatches=2, layers=(1, 2), embed_and_head=embed_and_head)
    return lay_out(BLOCK_MODEL, {"pipe": pipe, "data": 2}, devices=toy.devices(4))


def layouts_of(table):
    return {row.path: str(row.layout) for row in table.rows}


def test_within_a_step_nothing_outside_the_blocks_is_split():
    stored, within = (layouts_of(table) for table in (split_plan().table, split_plan().used_table))
    assert (stored["embed/table"], stored["head/out"]) == ("(pipe, None)", "(pipe, None)")
    assert (within["embed/table"], within["head/out"]) == ("(None, None)", "(None, None)")
    assert within["blocks/up"] == stored["blocks/up"] == "(pipe, None, None)"


def gathers_and_scatters(plan, reduce="float32"):
    given = replace(plan, options=StepOptions(precision=Precision(reduce=reduce)))
    lines = cost(given, StepCounts(count_calls(BLOCK_MODEL, 1)), "gpu")
    return [(line.kind, line.bytes) for line in lines if line.kind != "collective-permute"]


def test_embedding_and_head_cost_a_gather_and_a_scatter_each():
    kinds = ("all-gather", "reduce-scatter")
    assert gathers_and_scatters(split_plan()) == [(kind, 4 * ELEMENTS) for kind in kinds] * 2
    narrow = gathers_and_scatters(split_plan(), "bfloat16")
    assert [size for _, size in narrow] == [4 * ELEMENTS, 2 * ELEMENTS] * 2
    assert gathers_and_scatters(split_plan("whole")) == []


@pytest.mark.slow
def test_begin_gathers_and_finish_scatters():
    specs = split_plan().manual_specs(split_plan().table)

    def run(params):
        whole = begin(params, split_plan())
        assert whole["embed"]["table"].shape == (toy.VOCABULARY, toy.WIDTH)
        assert whole["blocks"] is params["blocks"]
        share = (1.0 + 10 * lax.axis_index("pipe")).astype("bfloat16")
        return finish({**whole, "head": {"out": whole["head"]["out"].astype("bfloat16") * share}}, split_plan())

    mapped = jax.shard_map(run, mesh=split_plan().mesh.backend_mesh, in_specs=(specs,), out_specs=specs)
    shapes = split_plan().table.abstract_arrays
    given = jax.tree.map(lambda leaf: jnp.arange(float(leaf.size)).reshape(leaf.shape) % 64, shapes)
    found = jax.jit(mapped)(given)
    assert np.array_equal(found["embed"]["table"], 2 * given["embed"]["table"]), "both stages hold the same"
    assert np.array_equal(found["head"]["out"], 12 * given["head"]["out"]), "summed over the stages"
    assert found["head"]["out"].dtype == jnp.bfloat16
    assert np.array_equal(found["blocks"]["up"], given["blocks"]["up"])
    scatters = [line for line in str(jax.make_jaxpr(mapped)(given)).splitlines() if "= reduce_scatter" in line]
    assert all(":f32[" in line.split("=")[0] for line in scatters), "in the reduce dtype"
