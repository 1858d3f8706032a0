"""What a step is predicted to move: nothing that the model says of itself is lost, and shapes are asked for."""

from dataclasses import replace

import jax
import optax
import pytest
from spmdkit.models.frozen import freeze, frozen_paths
from spmdkit.models.moe import MoEConfig, moe
from spmdkit.parallel import Model, build_step, census, lay_out
from spmdkit.parallel.collectives import Collective, merge
from spmdkit.parallel.pipeline import PipelineConfig
from spmdkit.parallel.sharding.strategies import STRATEGIES, axes_that_split
from spmdkit.parallel.step.composition import split_model
from spmdkit.parallel.step.cost import count_calls, step_cost, step_counts
from spmdkit.training.optimizing.optimizers import OptimizerConfig, make_optimizer
from support import toy

SIZES = {"vocabulary": 32, "length": 16, "layers": 4, "width": 16, "heads": 4, "mlp_width": 32}
MIXTURE = moe(MoEConfig(**SIZES, experts=4, top_k=2))
FREEZE = ("blocks/mlp/.*", "embed/.*")
BATCH = {
    name: jax.ShapeDtypeStruct((16, 16), "float32" if name == "weights" else "int32")
    for name in ("inputs", "targets", "weights")
}


def frozen_mixture(patterns):
    """The mixture with some parameters frozen, and their paths."""
    shapes = jax.eval_shape(MIXTURE.init, jax.random.key(0))
    return freeze(MIXTURE, patterns), frozen_paths(patterns, shapes)


def built(**options):
    return toy.build({"expert": 2, "context": 2, "tensor": 2}, model=MIXTURE, **options)


def test_every_line_of_the_model_belongs_to_one_strategy():
    plan = built().plan
    counts = step_counts(split_model(MIXTURE, plan), plan, BATCH, "cpu")
    inside = [STRATEGIES[name] for name in axes_that_split("work")]
    claimed = [line for strategy in inside for line in strategy.cost(plan, counts, "cpu")]
    assert merge(claimed) == merge(counts.own) != ()


def test_microbatches_repeat_what_the_model_moves():
    once, twice = ({(line.kind, line.axes): line for line in built(accumulate=times).cost(BATCH)} for times in (1, 2))
    key = ("collective-permute", ("context",))
    assert twice[key].count == 2 * once[key].count
    assert twice[key].bytes == once[key].bytes


@pytest.mark.parametrize("frozen", [(), FREEZE], ids=["all train", "partly frozen"])
def test_local_recomputation_repeats_no_gather_or_scatter(frozen):
    model, paths = frozen_mixture(frozen)
    layouts = toy.plan({"expert": 2, "context": 2, "tensor": 2}, model, frozen=paths)

    def moved(remat):
        lines = build_step(model, toy.SGD, layouts, remat=remat).cost(BATCH)
        return [(line.count, line.bytes) for line in lines if line.kind in ("all-gather", "reduce-scatter")]

    assert moved("local") == moved("none") < moved("full")


def test_each_group_of_microbatches_passes_through_the_stages():
    """Twice as many permutes, of half as many rows."""
    strategy = {"pipe": {"size": 2, "microbatches": 2, "layers": [2, 1]}}
    once, twice = (toy.build(strategy, accumulate=times).cost(TOY_BATCH) for times in (1, 2))
    (before,), (after,) = ([line for line in lines if line.kind == "collective-permute"] for lines in (once, twice))
    assert (after.count, after.bytes) == (2 * before.count, before.bytes)


def test_a_table_that_embedding_and_head_share_has_the_gradients_of_both():
    timetable = toy.plan({"pipe": PipelineConfig(size=2, microbatches=4)}, toy.BLOCK_MODEL).pipeline.timetable
    apart, shared = (
        count_calls(replace(toy.BLOCK_MODEL, head_reads=reads), 3, timetable).group_gradients
        for reads in (("head",), ("embed", "head"))
    )
    assert shared == {"embed": apart["embed"] + apart["head"], "head": apart["head"]}


def step_of(model, strategy, frozen=(), **options):
    """A step on two devices, or four, with some parameters frozen."""
    given, shapes = freeze(model, frozen), jax.eval_shape(model.init, jax.random.key(0))
    paths = frozen_paths(frozen, shapes)
    layouts = lay_out(given, strategy, devices=toy.devices(2 * len(strategy)), frozen=paths)
    optimizer = make_optimizer(OptimizerConfig(freeze=frozen), 10, shapes)
    return build_step(given, optimizer, layouts, **options)


KEPT = {
    "block": {"fsdp": {"size": 2, "floor_bytes": 0}},
    "step": {"fsdp": {"size": 2, "floor_bytes": 0, "keep": "step"}},
    "whole gradients": {"data": {"size": 2, "zero": 2, "floor_bytes": 0}},
}
"""What is kept of gathered blocks, and of their gradients."""


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["dots", "local"])
def test_a_partly_frozen_mixture_moves_the_same_within_blocks_whatever_is_kept(remat):
    """Blocks get their parameters in another form in each case, and have the same program inside."""
    model, paths = frozen_mixture(FREEZE)

    def within_blocks(strategy):
        ring = {"size": 2, "collective_matmul": True}
        layouts = toy.plan({**strategy, "expert": 2, "tensor": ring}, model, frozen=paths)
        lines = build_step(model, toy.SGD, layouts, remat=remat).cost(BATCH)
        own = ("all-to-all", "all-gather", "collective-permute")
        return [line for line in lines if line.kind in own and line.axes in (("expert",), ("tensor",))]

    moved = [within_blocks(strategy) for strategy in KEPT.values()]
    assert moved[0] == moved[1] == moved[2] != []


FSDP = {"fsdp": {"size": 2, "floor_bytes": 0}}
ONE_TURN = replace(toy.BIASED_MODEL, scan_unroll=toy.BLOCKS)
TOY_BATCH = toy.abstract(toy.batch(0))
READ_ONCE = {
    # model, frozen, remat: biases that are only added, and what leads to no gradient
    "biases": (toy.BIASED_MODEL, (), "none"),
    "biases, full": (toy.BIASED_MODEL, (), "full"),
    "first block": (ONE_TURN, ("embed/.*", "blocks/(up|scale)"), "none"),
}


@pytest.mark.slow_cases("biases")
@pytest.mark.parametrize(
    "name", ["biases", *(pytest.param(name, marks=pytest.mark.slow) for name in READ_ONCE if name != "biases")]
)
def test_unread_parameters_are_gathered_once(name):
    model, frozen, remat = READ_ONCE[name]
    step = step_of(model, FSDP, frozen, remat=remat)
    predicted = step.cost(TOY_BATCH)
    assert census(step.compile(TOY_BATCH).as_text(), step.plan.mesh) == predicted
    assert predicted != step.cost(), "without shapes every parameter counts as read twice"


def test_a_pipeline_gathers_frozen_blocks_for_backward_too():
    """Every stage runs the same ticks: a census of the compiled step has as many gathers."""
    model = freeze(toy.BLOCK_MODEL, ("embed/.*", "blocks/.*"))
    frozen = frozen_paths(("embed/.*", "blocks/.*"), jax.eval_shape(model.init, jax.random.key(0)))
    strategy, batch = {"pipe": {"size": 3, "microbatches": 3}, **FSDP}, toy.abstract(toy.batch(0, rows=12))
    plans = [toy.plan(strategy, model, frozen=paths) for paths in (frozen, ())]
    costs = [merge(step_cost(model, plan, batch, "cpu")) for plan in plans]
    assert costs[0] != costs[1]
    assert costs[0][0] == costs[1][0] == Collective("all-gather", ("fsdp",), 20, 53_632)


def moved_by(step, path):
    """What a step moves less without one parameter, by kind and axes."""
    whole, less = (
        {
            (line.kind, line.axes): line
            for line in merge(step_cost(toy.BLOCK_MODEL, step.plan, TOY_BATCH, "cpu", without))
        }
        for without in ((), (path,))
    )
    assert less.keys() <= whole.keys()
    return {
        key: (line.count - less[key].count, line.bytes - less[key].bytes) if key in less else (line.count, line.bytes)
        for key, line in whole.items()
        if less.get(key) != line
    }


TABLE = 4 * toy.VOCABULARY * toy.WIDTH


def test_what_one_parameter_moves_in_a_pipeline():
    """What stages send is that of the whole step, though the embedding makes it."""
    step = step_of(toy.BLOCK_MODEL, {"pipe": {"size": 2, "layers": [2, 1], "embed_and_head": "split"}, "data": 2})
    assert moved_by(step, "embed/table") == {
        ("all-gather", ("pipe",)): (1, TABLE),
        ("reduce-scatter", ("pipe",)): (1, TABLE),
        ("all-reduce", ("data",)): (0, TABLE // 2),  # in one with the gradients of the blocks
    }


def test_without_a_parameter_the_norm_is_still_summed():
    """The table alone is split: its share of the norm is a scalar of the whole step, which stays."""
    step = step_of(toy.BLOCK_MODEL, {"fsdp": {"size": 2, "floor_bytes": TABLE}, "data": 2}, ("blocks/.*",))
    moved = moved_by(step, "embed/table")
    assert moved[("all-gather", ("fsdp",))] == (1, TABLE)
    assert ("all-reduce", ("data", "fsdp")) not in moved


def test_shapes_are_asked_for():
    with pytest.raises(ValueError, match="Pass abstract_batch"):
        built().cost()


@pytest.mark.slow_cases("strategy0", "strategy1")
@pytest.mark.parametrize("strategy", [{"data": 2}, FSDP])
def test_a_weight_that_a_metric_shares_with_the_loss_travels_with_both(strategy):
    """XLA would sum it once, and less than predicted would move."""

    def init(key):
        return {"kernel": jax.random.normal(key, (8, 4))}

    def loss(params, batch, key):
        logits, weight = batch["inputs"] @ params["kernel"], batch["weights"].sum()
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        hits = (logits.argmax(-1) == batch["targets"]) * batch["weights"]
        return (losses * batch["weights"]).sum(), weight, {"accuracy": (hits.sum(), weight), "rows": (weight, weight)}

    model = Model(init=init, loss=loss, name="linear")
    dtypes = {"inputs": ((16, 8), "float32"), "targets": ((16,), "int32"), "weights": ((16,), "float32")}
    batch = {name: jax.ShapeDtypeStruct(*each) for name, each in dtypes.items()}
    step = toy.build(strategy, model=model)
    assert census(step.compile(batch).as_text(), step.plan.mesh) == step.cost(batch)
