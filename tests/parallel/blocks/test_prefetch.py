"""Blocks gathered ahead: the numbers and the traffic of the plain form, and what it does not go with."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.models.transformer import TransformerConfig, transformer
from spmdkit.parallel import FSDPConfig, build_step, census, lay_out
from spmdkit.parallel.blocks.prefetch import check_prefetch
from spmdkit.parallel.context import ContextConfig
from support import toy

BLOCKS, FLOOR = 5, 512


def init(key):
    params = toy.init(key)
    return {**params, "blocks": jax.tree.map(lambda leaf: jnp.concatenate([leaf, -leaf[:2]]), params["blocks"])}


def block(params, x, key):
    """The toy's block with dropout of whole columns: the same on every device."""
    kept = 1.0 if key is None else 2.0 * jax.random.bernoulli(key, 0.5, (1, 1, toy.WIDTH))
    return x + kept * (toy.block(params, x, None) - x)


MODEL = replace(toy.BLOCK_MODEL, init=init, block=block, num_blocks=BLOCKS)


def built(prefetch, remat, accumulate=1):
    config = FSDPConfig(size=4, floor_bytes=FLOOR, prefetch=prefetch)
    layouts = lay_out(MODEL, {"fsdp": config}, devices=toy.devices(4))
    return build_step(MODEL, optax.sgd(1.0), layouts, remat=remat, accumulate=accumulate)


@cache
def trained(prefetch, remat, accumulate=1):
    """One step of plain descent: the change of the parameters is the gradient."""
    step = built(prefetch, remat, accumulate)
    compiled = step.compile(toy.abstract(toy.batch(0)))
    state = step.init(0)
    before = jax.tree.map(np.asarray, state.params)
    state, metrics = step(state, toy.batch(0))
    gradients = jax.tree.map(lambda old, new: old - np.asarray(new), before, state.params)
    return float(metrics.loss), gradients, census(compiled.as_text(), step.plan.mesh), step.cost()


@pytest.mark.slow_cases("full-1", "none-1")
@pytest.mark.parametrize(
    ("remat", "accumulate"), [("none", 1), ("full", 1), pytest.param("none", 2, marks=pytest.mark.slow)]
)
def test_prefetching_keeps_numbers_and_traffic(remat, accumulate):
    loss, gradients, found, predicted = trained(1, remat, accumulate)
    plain_loss, plain, *_ = trained(0, "none")
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    assert max(jax.tree.leaves(jax.tree.map(toy.relative, gradients, plain))) < 1e-5
    assert found == predicted == built(0, remat, accumulate).cost()


@pytest.mark.slow
def test_each_block_is_gathered_twice_and_scattered_once():
    """Two matrices of each block; the tables outside are gathered and scattered once."""
    count = {line.kind: line.count for line in trained(1, "none")[2]}
    assert count["all-gather"] == 2 * BLOCKS * 2 + 2
    assert count["reduce-scatter"] == 2 * BLOCKS + 2


@pytest.mark.slow
def test_evaluation_too():
    total, weight = (float(value) for value in built(1, "none").evaluate(built(1, "none").init(0).params, toy.batch(0)))
    expected = MODEL.loss(init(jax.random.key(0)), toy.batch(0), None)
    assert (total, weight) == pytest.approx(tuple(map(float, expected)), rel=1e-5)


def test_rejects_invalid_prefetch_options():
    check_prefetch(4, "none")
    check_prefetch(4, "full")
    with pytest.raises(ValueError) as raised:
        check_prefetch(3, "dots")
    blocks, remat = str(raised.value).splitlines()
    assert blocks == (
        "strategy.fsdp.prefetch=1 needs 4 blocks or more, and the model has 3: a shorter loop cannot hide a gather. "
        "Set strategy.fsdp.prefetch to 0, or increase model.layers."
    )
    assert remat.startswith("train.remat=dots does not combine with strategy.fsdp.prefetch=1: ")
    assert remat.endswith("Set train.remat to none or full, or prefetch to 0.")


def test_build_step_rejects_prefetch_with_dots():
    with pytest.raises(ValueError, match=r"train\.remat=dots does not combine with strategy\.fsdp\.prefetch=1"):
        built(1, "dots")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"prefetch": 2}, "strategy.fsdp.prefetch=2 must be 0 or 1."),
        ({"prefetch": 1, "keep": "step"}, "strategy.fsdp.prefetch has an effect only with keep: block"),
    ],
)
def test_options(options, problem):
    with pytest.raises(ValueError) as raised:
        FSDPConfig(size=2, **options)
    assert problem in str(raised.value)


PACKED = {
    name: jax.ShapeDtypeStruct((8, 16), "float32" if name == "weights" else "int32")
    for name in ("inputs", "targets", "weights", "segments", "positions")
}


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["all_to_all", "ring"])
def test_packed_rows_with_context_pass_vma_checks(attention):
    """What varies over fewer axes than activations, segments, keeps its type: no UncheckedStep, which is an error."""
    model = transformer(TransformerConfig(vocabulary=16, length=16, layers=4, width=8, heads=2))
    strategy = {
        "fsdp": FSDPConfig(size=2, floor_bytes=256, prefetch=1),
        "context": ContextConfig(size=2, attention=attention),
    }
    step = build_step(model, optax.sgd(0.1), lay_out(model, strategy, devices=toy.devices(4)))
    assert "optimization_barrier" in step.lower(PACKED, "cpu").as_text()
