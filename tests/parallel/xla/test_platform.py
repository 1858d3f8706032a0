"""Which tricks are in the programs for simulated devices and for GPUs: real steps, lowered without a GPU."""

import re
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from spmdkit.models.transformer import transformer
from spmdkit.models.transformer_config import TransformerConfig
from spmdkit.parallel import FSDPConfig, build_step, census
from spmdkit.parallel.pipeline import PipelineConfig
from spmdkit.parallel.tensor import TensorConfig
from spmdkit.parallel.xla.platform import TRICKS, branches_of_gpus, by_platform, overlaps, scope, uses
from support import toy

FSDP = FSDPConfig(size=2, floor_bytes=256, prefetch=1)
GATHERED = FSDPConfig(size=2, floor_bytes=256)


class Case(NamedTuple):
    """A strategy, and the tricks that are in its program on simulated devices."""

    strategy: dict
    tricks: set
    layers: int = 4


def pipe(schedule, **options):
    return PipelineConfig(size=2, schedule=schedule, microbatches=4, **options)


PRODUCTS = {"product", "weight_first", "order"}
CASES = {
    "data": Case({"data": 2}, PRODUCTS),
    "fsdp, prefetched": Case({"fsdp": FSDP}, PRODUCTS),
    "tensor in a ring": Case({"tensor": TensorConfig(size=2, collective_matmul=True)}, PRODUCTS - {"product"}),
    "context in a ring": Case({"context": 2}, PRODUCTS),
    "pipe, there and back": Case({"pipe": pipe("1f1b"), "context": 2}, {*PRODUCTS, "loops", "hop_in_groups"}),
    "pipe, round": Case({"pipe": pipe("interleaved_1f1b"), "fsdp": GATHERED}, {*PRODUCTS, "loops"}, layers=5),
    "pipe, v": Case({"pipe": pipe("zbv", recompute=True)}, {*PRODUCTS, "loops"}),
}
QUICK = ("data", "pipe, there and back")
EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
STAGES = [each for each in EACH if str(each.values[0]).startswith("pipe")]
BATCH = toy.batch(0)
PLATFORMS = ("cpu", "cuda")


@cache
def step_of(name):
    case = CASES[name]
    sizes = {"width": 16, "heads": 4, "kv_heads": 2, "mlp_width": 32}
    model = transformer(TransformerConfig(vocabulary=toy.VOCABULARY, length=toy.LENGTH, layers=case.layers, **sizes))
    return toy.build(case.strategy, model=model)


@cache
def traced(name):
    return step_of(name).trace(toy.abstract(BATCH))


@cache
def program(name, platform):
    return traced(name).lower(lowering_platforms=(platform,)).as_text(debug_info=True)


def count(pattern, name, platform):
    return len(re.findall(pattern, program(name, platform)))


@pytest.mark.slow_cases("data", "pipe, there and back")
@pytest.mark.parametrize("name", EACH)
def test_gpus_run_no_trick_and_simulated_devices_all_that_they_need(name):
    used = {platform: {trick for trick in TRICKS if scope(trick) in program(name, platform)} for platform in PLATFORMS}
    assert used == {"cpu": CASES[name].tricks, "cuda": set()}


def test_each_trick_is_looked_for():
    assert set().union(*(case.tricks for case in CASES.values())) == set(TRICKS)


@pytest.mark.slow_cases("pipe, there and back")
@pytest.mark.parametrize("name", EACH)
def test_the_barriers_of_simulated_devices_are_not_on_gpus(name):
    """GPUs keep two for prefetched gathers, as all platforms do, and one that reduces the head's gradient early."""
    barrier = "stablehlo.optimization_barrier"
    assert count(barrier, name, "cuda") == (3 if name == "fsdp, prefetched" else 0)
    assert count(barrier, name, "cpu") > count(barrier, name, "cuda")


@pytest.mark.slow_cases("pipe, there and back")
@pytest.mark.parametrize("name", STAGES)
def test_a_stage_skips_by_conditionals_on_gpus_and_by_loops_on_simulated_devices(name):
    loop, conditional = (rf"turns_\d+_of_\d+/{kind}" for kind in ("while", "cond"))
    assert count(loop, name, "cpu") > 0 == count(conditional, name, "cpu")
    is_even = CASES[name].layers % 2 == 0
    assert count(conditional, name, "cuda") > 0
    assert (count(loop, name, "cuda") == 0) == is_even, "blocks of unequal stages run in the same loops"


def test_simulated_devices_take_the_branches_of_gpus_if_a_test_asks_for_it():
    assert not overlaps("cpu")
    assert uses("loops", "cpu")
    with branches_of_gpus():
        assert overlaps("cpu")
        assert not uses("loops", "cpu")
    assert not overlaps("cpu")


@pytest.mark.parametrize("trick", TRICKS)
def test_only_required_tricks_stay_with_the_branches_of_gpus(trick):
    def choose(x):
        return by_platform(trick, jnp.sin, jnp.cos, x)

    expected = jnp.sin if TRICKS[trick].is_required else jnp.cos
    with branches_of_gpus():
        assert jax.jit(choose)(1.0) == expected(1.0)
    assert jax.jit(lambda x: choose(x))(1.0) == jnp.sin(1.0)


@pytest.mark.long_cases("pipe, round")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipe, round", "pipe, v"])
def test_conditionals_give_the_numbers_and_the_census_of_loops(name):
    """The program that GPUs run, run here: what it moves is what `cost` says. Only the factors of products, which the
    tricks `product` and `weight_first` transpose, round differently."""
    looped = step_of(name)
    in_loops, of_loops = looped(looped.init(0), BATCH)
    with branches_of_gpus():
        branched = build_step(looped.given_model, optax.sgd(0.1), looped.plan)
        text = branched.compile(toy.abstract(BATCH)).as_text()
        assert " conditional(" in text
        assert census(text, looped.plan.mesh) == branched.cost(toy.abstract(BATCH))
        in_conditionals, of_conditionals = branched(branched.init(0), BATCH)
    assert float(of_loops.loss) == float(of_conditionals.loss)
    errors = jax.tree.map(toy.relative, in_conditionals.params, in_loops.params)
    assert max(jax.tree.leaves(errors)) < 1e-6
