"""Frozen parameters: no gradient, no part in the norm, and the gradients of all others as they were."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from spmdkit.layouts.paths import leaves_with_paths
from spmdkit.models.frozen import freeze, frozen_paths
from spmdkit.models.transformer import TransformerConfig, transformer
from spmdkit.parallel import build_step, census, lay_out
from spmdkit.parallel.model import ParallelContext
from spmdkit.parallel.tensor import TensorConfig
from spmdkit.training.optimizing.optimizers import OptimizerConfig, make_optimizer
from support import toy

PATTERNS = ("embed/.*", "blocks/(up|scale)")
FROZEN = {"embed/table", "blocks/up", "blocks/scale"}


def gradients(model):
    params, batch = toy.init(jax.random.key(0)), toy.batch(0)
    return dict(leaves_with_paths(jax.jit(jax.grad(lambda params: model.loss(params, batch, None)[0]))(params)))


@pytest.mark.slow_cases("blocks", "plain")
@pytest.mark.parametrize("model", [toy.BLOCK_MODEL, toy.PLAIN_MODEL], ids=["blocks", "plain"])
def test_frozen_parameters_have_no_gradient_and_the_others_the_same(model):
    found, whole = gradients(freeze(model, PATTERNS)), gradients(model)
    assert {path for path, leaf in found.items() if not leaf.any()} == FROZEN
    assert not {path for path, leaf in whole.items() if not leaf.any()}
    for path in whole.keys() - FROZEN:
        np.testing.assert_array_equal(found[path], whole[path])


def test_the_same_loss():
    params, batch = toy.init(jax.random.key(0)), toy.batch(0)
    frozen = freeze(toy.BLOCK_MODEL, PATTERNS)
    assert jax.jit(frozen.loss)(params, batch, None) == jax.jit(toy.BLOCK_MODEL.loss)(params, batch, None)
    assert freeze(toy.BLOCK_MODEL, ()) is toy.BLOCK_MODEL


@pytest.mark.slow_cases("{'fsdp': {'size': 8, 'floor_bytes': 0}}")
@pytest.mark.parametrize(
    "strategy", [{"fsdp": {"size": 8, "floor_bytes": 0}}, {"data": {"size": 8, "zero": 2}}], ids=str
)
def test_norm_and_clip_count_what_trains(strategy):
    """The norm of a step is that of the gradients that train alone, and what is clipped to it has that norm."""
    batch, whole = toy.batch(0), gradients(toy.BLOCK_MODEL)
    weight = batch["weights"].sum()
    trained = np.sqrt(sum(np.square(leaf / weight).sum() for path, leaf in whole.items() if path not in FROZEN))
    clip = float(trained) / 2
    model = freeze(toy.BLOCK_MODEL, PATTERNS)
    step = build_step(model, optax.sgd(1.0), lay_out(model, strategy), clip_norm=clip)
    found, metrics = step.gradients(step.init(0), batch)
    np.testing.assert_allclose(metrics.grad_norm, trained, rtol=1e-5)
    for path, leaf in leaves_with_paths(found):
        expected = np.zeros_like(leaf) if path in FROZEN else whole[path] / weight / 2
        np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-7)


SENDS_LESS = {
    # strategy, frozen: nothing is sent for gradients that nobody needs, and the blocks alone go without backward
    "fsdp": ({"fsdp": {"size": 8, "floor_bytes": 0}}, PATTERNS),
    "fsdp, head alone": ({"fsdp": {"size": 8, "floor_bytes": 0}}, ("embed/.*", "blocks/.*")),
    "zero 1": ({"data": {"size": 8, "zero": 1, "floor_bytes": 0}}, PATTERNS),
    "pipe": ({"pipe": {"size": 2, "embed_and_head": "split", "layers": [2, 1]}, "data": 4}, PATTERNS),
}


@pytest.mark.slow_cases("fsdp", "pipe", "zero 1")
@pytest.mark.parametrize("name", SENDS_LESS)
def test_the_compiled_step_sends_what_is_predicted(name):
    strategy, patterns = SENDS_LESS[name]
    model = freeze(toy.BLOCK_MODEL, patterns)
    shapes = jax.eval_shape(toy.init, jax.random.key(0))
    frozen = frozen_paths(patterns, shapes)
    batch = toy.abstract(toy.batch(0, rows=32))
    costs = []
    for paths in (frozen, ()):
        layouts = lay_out(model, strategy, frozen=paths)
        step = build_step(model, make_optimizer(OptimizerConfig(freeze=patterns), 10, shapes), layouts)
        costs.append(step.cost(batch))
        if paths:
            assert census(step.compile(batch).as_text(), layouts.mesh) == costs[0]
    assert costs[0] != costs[1]


SPLIT = ParallelContext(tensor=TensorConfig(size=2))
SHAPES = {name: jax.ShapeDtypeStruct((2, 8), "int32") for name in ("inputs", "targets", "weights", "example")}


@pytest.mark.parametrize(
    ("patterns", "silent"),
    [
        (("head/norm",), []),
        (("embed/.*",), ["embed"]),
        (("blocks/.*",), []),  # gradients go through them to the embedding
        (("embed/.*", "blocks/.*"), ["embed", "block"]),
    ],
    ids=str,
)
def test_what_a_split_model_moves_backward(patterns, silent):
    """Backward ends at the first part that trains; what lies before moves nothing more."""
    split = transformer(TransformerConfig(vocabulary=16, length=8, layers=2, width=8, heads=2))
    moved = freeze(split, patterns).parallelize(SPLIT).traffic
    parts = {part: moved(part, SHAPES, "float32", "cpu") for part in ("embed", "block", "head")}
    assert [part for part, traffic in parts.items() if not traffic.backward] == silent
    assert all(traffic.forward for traffic in parts.values())


def test_an_embedding_that_reads_the_head_has_a_backward_pass():
    split = transformer(TransformerConfig(vocabulary=16, length=8, layers=2, width=8, heads=2), SPLIT)
    model = freeze(replace(split, embed_reads=("embed", "head")), ("embed/.*", "blocks/.*"))
    assert model.traffic("embed", SHAPES, "float32", "cpu").backward


def test_rejects_invalid_freeze_patterns():
    params = toy.init(jax.random.key(0))
    assert frozen_paths(PATTERNS, params) == FROZEN
    with pytest.raises(
        ValueError, match=r"optimizer.freeze: 'embde/.*' matches no parameter. Did you mean embed/table"
    ):
        freeze(toy.PLAIN_MODEL, ("embde/.*",))
    with pytest.raises(ValueError, match=r"optimizer.freeze=\['.*'\] matches all 5 parameters .* none is left to tr"):
        frozen_paths((".*",), params)
