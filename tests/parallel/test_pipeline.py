"""Pipelines: every schedule's loss and gradients are those of one device, whatever lies in empty places."""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import toy
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from spmdkit.models.transformer import transformer
from spmdkit.models.transformer_config import TransformerConfig
from spmdkit.parallel import BlockModel, FSDPConfig, Precision, build_step, census, lay_out
from spmdkit.parallel.blocks.pieces import Pieces
from spmdkit.parallel.data import DataParallelConfig
from spmdkit.parallel.executor.run import run_forward, run_gradients
from spmdkit.parallel.executor.stage import Inputs
from spmdkit.parallel.pipeline import PipelineConfig, forwards_only, make_pipeline
from spmdkit.parallel.schedule.timetable import make_timetable
from spmdkit.parallel.sharding.stored_order import store_blocks, unstore_blocks

ROWS, LENGTH, VOCABULARY = 16, 8, 32
FLOAT64 = Precision(params="float64", compute="float64", reduce="float64")
TOLERANCE = 1e-13


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


def model(layers, tied=False, dropout=0.0):
    """A transformer where there is dropout; elsewhere a lighter model, which compiles in less than half the time."""
    return transformer(sizes(layers, tied, dropout)) if dropout else light(layers, tied)


def sizes(layers, tied, dropout):
    """Those of the transformer."""
    given = {"vocabulary": VOCABULARY, "length": LENGTH, "width": 16, "heads": 4, "kv_heads": 2, "mlp_width": 32}
    return TransformerConfig(**given, layers=layers, tied=tied, dropout=dropout)


def light(layers, tied=False):
    """The pieces of `toy` with so many blocks, no two of them alike."""

    def init(key):
        blocks = jax.vmap(lambda key: toy.init(key)["blocks"])(jax.random.split(key, layers))
        own = {"blocks": jax.tree.map(lambda leaf: leaf[:, 0], blocks)}
        return toy.init(key) | own | ({"head": {}} if tied else {})

    return BlockModel(
        init=init,
        embed=toy.embed,
        block=toy.block,
        head=toy.tied_head if tied else toy.head,
        num_blocks=layers,
        head_reads=("embed", "head") if tied else ("head",),
    )


def pieces_of(model):
    """The model in pieces, with nothing to gather."""
    return Pieces(
        embed=lambda groups, whole, batch, key: model.embed(groups, batch, key),
        block=lambda params, whole, x, key: model.block(params, x, key),
        head=lambda groups, whole, x, batch, key: model.head(groups, x, batch, key),
        embed_reads=model.embed_reads,
        head_reads=model.head_reads,
    )


def pipelined(model, config):
    """(stored parameters, batch, key, fill) -> gradients and sums of training, sums of evaluation; all global."""
    pipeline = make_pipeline(config, model.num_blocks)
    forwards = make_timetable(forwards_only(pipeline.schedule, pipeline.schedule.microbatches), pipeline.stages)
    axes, pieces = ("pipe", "data"), pieces_of(model)
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
        gradients, sums = run_gradients(pieces, pipeline.timetable, inputs, axes=axes, fill=fill)
        evaluated = run_forward(pieces, forwards, inputs, axes=axes, fill=fill)
        summed = {
            name: jax.tree.map(lambda leaf, name=name: lax.psum(leaf, split[name]), group)
            for name, group in gradients.items()
        }
        return summed, lax.psum(sums, axes), lax.psum(evaluated, axes)

    in_specs = (specs, PartitionSpec("data"), PartitionSpec(), PartitionSpec())
    out_specs = (specs, PartitionSpec(), PartitionSpec())
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True))

    def run(params, batch, key, fill):
        stored = {**params, "blocks": store_blocks(params["blocks"], pipeline.stages)}
        gradients, sums, evaluated = mapped(stored, batch, key, fill)
        return {**gradients, "blocks": unstore_blocks(gradients["blocks"], pipeline.stages)}, sums, evaluated

    return run


@cache
def drawn(tied, dropout):
    """Parameters of more blocks than any case has, on the host."""
    most = model(max(case.layers for case in CASES), tied, dropout)
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), jax.jit(most.init)(jax.random.key(0)))


def first_params(layers, tied=False, dropout=0.0):
    params = drawn(tied, dropout)
    return {**params, "blocks": jax.tree.map(lambda leaf: leaf[:layers], params["blocks"])}


@cache
def one_device(layers, tied, dropout):
    """((sum of the loss, of the weights), gradients) in plain JAX on one device; with dropout those of key 1."""
    return differentiate(layers, tied, dropout, jax.random.key(1))


def differentiate(layers, tied, dropout, key):
    params, batch = first_params(layers, tied, dropout), toy.batch(3, ROWS)
    if dropout:
        return reference.transformer.differentiate(sizes(layers, tied, dropout), params, batch, key)
    own = model(layers, tied)
    return jax.jit(jax.value_and_grad(lambda params: own.loss(params, batch, None), has_aux=True))(params)


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


@pytest.mark.parametrize("case", [marked(number, case) for number, case in enumerate(CASES)])
def test_every_schedule_is_one_device(float64, case):
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


PIPE = PipelineConfig(size=2, schedule="1f1b", microbatches=4)
SPLIT = PipelineConfig(size=2, schedule="zbv", microbatches=4, embed_and_head="split")
FOUR = PipelineConfig(size=4, schedule="zb_h1", microbatches=4)
FSDP, KEPT = FSDPConfig(size=2, floor_bytes=256), FSDPConfig(size=2, floor_bytes=256, keep="step")
BESIDE = {  # (strategy, dropout, options of the step)
    "gathered once": ({"pipe": FOUR, "fsdp": KEPT}, 0.0, {}),
    "embedding and head split": ({"pipe": SPLIT, "fsdp": FSDP, "data": DataParallelConfig(size=2, zero=1)}, 0.0, {}),
    "accumulated": ({"pipe": PIPE, "fsdp": FSDP, "tensor": 2}, 0.1, {"accumulate": 2, "remat": "dots"}),
}
LAYERS = 5


def keeps_gradients():
    """An optimizer whose state is the gradients that it was given: the step that is compiled shows them."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda gradients, _, params=None: (jax.tree.map(jnp.zeros_like, gradients), gradients),
    )


@cache
def means_of_one_device(dropout):
    """Mean gradients of the first step, and the sums (loss, weight) of evaluation, on one device."""
    own, params, batch = model(LAYERS, dropout=dropout), first_params(LAYERS, dropout=dropout), toy.batch(3, ROWS)
    (_, weight), sums = differentiate(LAYERS, False, dropout, jax.random.fold_in(jax.random.key(0), 0))
    return jax.tree.map(lambda leaf: leaf / weight, sums), jax.jit(lambda: own.loss(params, batch, None))()


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "dropout", "options"), BESIDE.values(), ids=BESIDE)
def test_a_step_beside_other_strategies(float64, strategy, dropout, options):
    """Gradients, evaluation, and every collective where the cost says: FSDP's in F, B and W, permutes at each tick."""
    own, batch = model(LAYERS, dropout=dropout), toy.batch(3, ROWS)
    layouts = lay_out(own, strategy, devices=toy.devices(8), precision=FLOAT64)
    step = build_step(own, keeps_gradients(), layouts, precision=FLOAT64, **options)
    state = step.init(0, first_params(LAYERS, dropout=dropout))
    expected, sums = means_of_one_device(dropout)
    abstract = toy.abstract(batch)
    assert census(step.compile(abstract).as_text(), layouts.mesh) == step.cost(abstract)
    np.testing.assert_allclose(step.evaluate(state.params, batch), sums, rtol=TOLERANCE)
    state, _ = step(state, batch)
    errors = jax.tree.map(toy.relative, layouts.stored_order.to_model(state).opt_state, expected)
    assert max(jax.tree.leaves(errors)) < TOLERANCE


@pytest.mark.parametrize("strategy", [{}, {"fsdp": FSDP}], ids=["pipe", "pipe x fsdp"])
def test_clipping_is_by_the_norm_over_all_stages(float64, strategy):
    """Each block counts once, on whichever stage it is; what every stage holds and what fills them up does not more."""
    own, batch = model(LAYERS), toy.batch(3, ROWS)
    pipe = PipelineConfig(size=2, schedule="interleaved_1f1b", microbatches=4)
    strategy = {"pipe": pipe, **strategy}
    layouts = lay_out(own, strategy, devices=toy.devices(2 * len(strategy)), precision=FLOAT64)
    step = build_step(own, keeps_gradients(), layouts, precision=FLOAT64, clip_norm=0.01)
    state, metrics = step(step.init(0, first_params(LAYERS)), batch)
    expected, norm = reference.clip(means_of_one_device(0.0)[0], 0.01)
    assert norm > 0.02
    np.testing.assert_allclose(metrics.grad_norm, norm, rtol=1e-12)
    errors = jax.tree.map(toy.relative, layouts.stored_order.to_model(state).opt_state, expected)
    assert max(jax.tree.leaves(errors)) < TOLERANCE


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
            ["embed_and_head='first'", "the choices are whole, split"],
        ),
        ({"pipe": {"size": 2, "chunks": 2}}, False, ["strategy.pipe.chunks: there is no such option"]),
    ],
)
def test_what_does_not_fit_is_explained(strategy, plain, messages):
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
    with pytest.raises(
        ValueError, match=r"2 of 4 forwards are computed again \(R\), but not F0 of chunk 0 on stage 1\."
    ):
        lay_out(toy.BLOCK_MODEL, strategy, devices=toy.devices(2))


def test_rules_leave_the_stages_to_the_pipeline():
    rules = {"blocks/up": (None, None, None), "head/.*": ("pipe", None)}
    with pytest.raises(ValueError) as error:
        lay_out(toy.BLOCK_MODEL, {"pipe": 2}, rules=rules, devices=toy.devices(2))
    assert "Start this rule in layouts.rules with pipe" in str(error.value)
    assert "Leave pipe out of this rule" in str(error.value)


def test_splitting_what_is_outside_twice_is_refused():
    strategy = {"pipe": {"size": 2, "embed_and_head": "split"}, "data": {"size": 2, "zero": 2}}
    with pytest.raises(ValueError, match=r"strategy.pipe.embed_and_head=split.*strategy.data.zero=2.*to 1, or"):
        lay_out(toy.BLOCK_MODEL, strategy, devices=toy.devices(4))


@pytest.mark.parametrize(
    "optimizer", [optax.adamw(1e-3), optax.adafactor(1e-3, min_dim_size_to_factor=16)], ids=["adamw", "adafactor"]
)
def test_state_is_saved_in_the_models_order(optimizer):
    """Parameters, moments of their shape and factored ones; what fills up a stage is not saved, and not counted."""
    own = model(5)
    pipe = PipelineConfig(size=2, schedule="interleaved_1f1b", microbatches=4)
    layouts = lay_out(own, {"pipe": pipe, "data": 2}, devices=toy.devices(4))
    step = build_step(own, optimizer, layouts)
    state, order = step.init(seed=0), layouts.stored_order
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
    layouts.check_rows(16)  # 2 x 2 microbatches by default
    with pytest.raises(ValueError, match=r"strategy.pipe.microbatches 4.*12 % 8 = 4.*\(16 is the nearest\)"):
        layouts.check_rows(12)
