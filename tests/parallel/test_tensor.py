"""Tensor parallel in small: which heads go where, what cannot be split, axes left to XLA."""

from functools import cache

import jax
import numpy as np
import pytest
import reference
from jax.sharding import PartitionSpec as P
from spmdkit.models.transformer import TransformerConfig, transformer
from spmdkit.parallel import FSDPConfig, Precision
from spmdkit.parallel.tensor import (
    TensorConfig,
    embed_tokens,
    key_value_rule,
    own_key_value_weight,
    split_cross_entropy,
)
from support import toy

from spmdkit import LayoutError

VOCABULARY, LENGTH, ROWS = 48, 20, 4
SIZES = {"vocabulary": VOCABULARY, "length": LENGTH, "layers": 2, "width": 16, "heads": 4, "kv_heads": 2}
SIZES |= {"mlp_width": 32}
LEFT = TensorConfig(size=2, explicit=False)
MLP_RULES = {"blocks/mlp/(gate|up)": (None, None, "tensor"), "blocks/mlp/down": (None, "tensor", None)}


@cache
def model(**changes):
    return transformer(TransformerConfig(**{**SIZES, **changes}))


def over_tensor(size, function, in_specs, out_specs):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:size]), ("tensor",))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


# Key-value heads


@pytest.mark.parametrize(
    ("size", "kv_heads", "rule"),
    [
        *[(1, 1, "split"), (2, 2, "split"), (2, 4, "split"), (4, 8, "split")],
        *[(2, 1, "one"), (4, 2, "one"), (8, 4, "one")],
        *[(2, 3, "per query"), (4, 6, "per query"), (6, 4, "per query")],
    ],
)
def test_key_value_rule_by_sizes(size, kv_heads, rule):
    assert key_value_rule(TensorConfig(size=size), kv_heads) == rule


@pytest.mark.parametrize(("heads", "kv_heads", "own"), [(8, 4, 1), (8, 2, 1), (12, 6, 3)])
def test_every_device_computes_the_heads_that_its_queries_read(heads, kv_heads, own):
    """Column blocks hold the number of their head, so that the result says which were taken."""
    size, width, depth = 4, 3, 2
    config = TensorConfig(size=size)
    rule = key_value_rule(config, kv_heads)
    weight = np.broadcast_to(np.repeat(np.arange(kv_heads), width), (depth, kv_heads * width)).astype(np.float32)
    spec = P(None, "tensor") if rule == "split" else P()
    take = over_tensor(
        size, lambda w: own_key_value_weight(config, w, heads, kv_heads)[None], spec, P("tensor", None, None)
    )
    taken = np.asarray(take(weight))
    assert taken.shape == (size, depth, own * width)
    per_device, group = heads // size, heads // kv_heads
    for device in range(size):
        read = [query // group for query in range(device * per_device, (device + 1) * per_device)]
        expected = read if rule == "per query" else sorted(set(read))
        np.testing.assert_array_equal(taken[device, 0].reshape(own, width)[:, 0], expected)
        np.testing.assert_array_equal(taken[device, 0], taken[device, 1])


def test_weights_of_key_value_heads_are_split_only_where_whole_heads_are():
    for kv_heads, axis in ((2, "tensor"), (1, None)):
        layouts = toy.plan({"tensor": 2}, model(kv_heads=kv_heads, attention_bias="inputs"))
        table = {row.path: row.layout.axes for row in layouts.table.rows}
        assert table["blocks/attention/key"] == table["blocks/attention/value"] == (None, None, axis)
        assert table["blocks/attention/key_bias"] == table["blocks/attention/value_bias"] == (None, axis)
        assert table["blocks/attention/query"] == (None, None, "tensor")


# What cannot be split


@pytest.mark.parametrize(
    ("changes", "size", "problem"),
    [
        ({"heads": 6, "kv_heads": 2, "head_width": 4}, 4,
         "model.heads=6 cannot be split over strategy.tensor=4: 6 % 4 = 2. Set model.heads to 8, or strategy.tensor to "
         "one of [1, 2]."),
        ({"mlp_width": 30}, 4,
         "model.mlp_width=30 cannot be split over strategy.tensor=4: 30 % 4 = 2. Set model.mlp_width to 32, or "
         "strategy.tensor to one of [1, 2]."),
        ({"vocabulary": 49}, 2,
         "model.vocabulary=49 cannot be split over strategy.tensor=2: 49 % 2 = 1. Set model.vocabulary to 50, or "
         "strategy.tensor to one of [1]."),
        ({"length": 18}, 4,
         "data.length=18: 18 positions on each device along context cannot be split over strategy.tensor=4: 18 % 4 = "
         "2. Set data.length to a multiple of 4."),
        ({"length": 12}, {"tensor": 4, "context": 2},
         "data.length=12: 6 positions on each device along context cannot be split over strategy.tensor=4: 6 % 4 = "
         "2. Set data.length to a multiple of 16."),
    ],
)  # fmt: skip
def test_rejects_indivisible_sizes(changes, size, problem):
    with pytest.raises(ValueError) as raised:
        toy.plan(size if isinstance(size, dict) else {"tensor": size}, model(**changes))
    assert str(raised.value) == problem


def test_rejects_rules_that_contradict_the_model():
    rules = {"blocks/mlp/gate": (None, "tensor", None), "head/logits": (None, None)}
    with pytest.raises(LayoutError) as raised:
        toy.plan({"tensor": 2}, model(), rules=rules)
    said = str(raised.value)
    remedy = "Correct the rule in layouts.rules, or set strategy.tensor.explicit=false to leave the axis to XLA."
    for text in (
        "3 problems with the layouts",
        "blocks/mlp/gate has the layout (None, tensor, None) by rule 'blocks/mlp/gate', but the model splits its own "
        f"work, so dim 1 must not be split over tensor. {remedy}",
        f"dim 2 must be split over tensor, before all other axes. {remedy}",
        "head/logits has the layout (None, None) by rule 'head/logits'",
    ):
        assert text in said
    toy.plan({"tensor": 2}, model(), rules={"blocks/mlp/gate": (None, None, "tensor")})


# The vocabulary


def test_a_token_outside_the_vocabulary_is_not_a_number():
    table = np.arange(8 * 3, dtype=np.float32).reshape(8, 3)
    tokens = np.array([[0, 7, 8, -1, 3, 4, 100, 5]], np.int32)
    look = over_tensor(
        4, lambda t, b: embed_tokens(TensorConfig(size=4), t, b), (P("tensor", None), P()), P(None, "tensor", None)
    )
    found = np.asarray(look(table, tokens))
    inside = (tokens >= 0) & (tokens < 8)
    np.testing.assert_array_equal(found[inside], table[tokens[inside]])
    assert np.isnan(found[~inside]).all()


@pytest.mark.slow
def test_the_split_loss_and_its_gradient_are_those_of_the_whole(float64):
    """Also where the largest logits of the parts are far apart, so that one shift has to hold for all of them."""
    random, size = np.random.default_rng(1), 4
    logits = random.normal(size=(2, 8, 12)) + np.repeat([-900.0, 0.0, 900.0, 850.0], 3)
    logits[:, ::2] = random.normal(size=(2, 4, 12))
    targets, weights = random.integers(0, 12, (2, 8)).astype(np.int32), random.random((2, 8)).astype(np.float32)

    def local(logits, targets, weights):
        def share(own):
            return split_cross_entropy(TensorConfig(size=size), own, targets, weights)

        (total, weight), gradient = jax.value_and_grad(share, has_aux=True)(logits)
        return jax.lax.psum((total, weight), "tensor"), gradient

    specs = P(None, None, "tensor"), P(), P(None, "tensor")
    sums, gradient = over_tensor(size, local, specs, (P(), specs[0]))(logits, targets, weights)
    plain = jax.value_and_grad(reference.transformer.cross_entropy, has_aux=True)
    expected, right = plain(jax.numpy.asarray(logits), targets, weights)
    np.testing.assert_allclose(sums, expected, rtol=1e-12)
    np.testing.assert_allclose(gradient, right, rtol=1e-9, atol=1e-12)


# Numbers and traffic

FSDP = FSDPConfig(size=2, floor_bytes=64)
TOY_RULES = {"blocks/up": (None, "fsdp", "tensor"), "blocks/down": (None, "tensor", "fsdp")}


def trained(step, batches):
    state, found = step.init(0), []
    for each in batches:
        state, metrics = step(state, each)
        found.append((float(metrics.loss), float(metrics.grad_norm)))
    return np.array(found), state.params


@cache
def of_toy(compute, devices):
    """Losses and norms of a model that knows of no mesh: `tensor` is left to XLA, inside explicit FSDP."""
    strategy, rules = ({"fsdp": FSDP, "tensor": LEFT}, TOY_RULES) if devices > 1 else ({"data": 1}, None)
    step = toy.build(strategy, rules=rules, clip_norm=1.0, precision=Precision(compute=compute))
    assert step.plan.manual_axes == (("fsdp",) if devices > 1 else ())
    return trained(step, [toy.batch(seed) for seed in range(3)])


@pytest.mark.slow
def test_an_axis_left_to_xla_in_bfloat16():
    """XLA's CPU backend ends the process where it has to reduce 16-bit numbers over axes that it splits itself."""
    np.testing.assert_allclose(of_toy("bfloat16", 4)[0], of_toy("float32", 1)[0], rtol=0.05)


def test_a_ring_permutes_where_others_gather_and_scatter():
    """Both products of both halves of each block; the embedding and the head keep their collectives."""
    abstract = toy.abstract(toy.batch(0, ROWS, LENGTH, VOCABULARY))
    ring, plain = (
        toy.build({"tensor": TensorConfig(size=4, collective_matmul=flag)}, model=model()).cost(abstract)
        for flag in (True, False)
    )
    count = {line.kind: line.count for line in ring}
    blocks, halves, permutes = 2, 2, 3
    assert count["collective-permute"] == blocks * halves * permutes * 2 * 2  # a gather and a scatter; two directions
    before = {line.kind: line.count for line in plain}
    assert "collective-permute" not in before
    for kind in ("all-gather", "reduce-scatter"):
        assert before[kind] - count[kind] == blocks * halves * 2
