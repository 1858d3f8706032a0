"""The mixture of experts against a plain NumPy one: routing, capacity, losses, and what a whole block adds."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from spmdkit.models import generate, load_model
from spmdkit.models.moe import MixtureOfExperts, MoEConfig, moe
from spmdkit.models.transformer import WHOLE, TransformerConfig

SMALL = MoEConfig(
    vocabulary=23,
    length=10,
    layers=2,
    width=16,
    heads=4,
    mlp_width=24,
    experts=4,
    top_k=2,
    capacity_factor=1.0,
    auxiliary_loss=0.5,
    z_loss=0.25,
)


def make_params(config):
    params = jax.jit(moe(config).init)(jax.random.key(0))
    noise = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64) + 0.1 * noise.normal(size=leaf.shape), params)


def make_batch(config, rows=3):
    random = np.random.default_rng(1)
    shape = (rows, config.length)
    return {
        "inputs": random.integers(0, config.vocabulary, shape).astype(np.int32),
        "targets": random.integers(0, config.vocabulary, shape).astype(np.int32),
        "weights": random.integers(0, 2, shape).astype(np.float32),
        "example": np.arange(rows, dtype=np.int32),
    }


def reference_routing(config, router, x):
    """One row, position by position: lists of (expert, weight), what was dropped, and the weighted losses."""
    logits = x @ router
    probability = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    taken, chosen, counts = np.zeros(config.experts, int), [], np.zeros(config.experts)
    limit = int(np.ceil(config.top_k * len(x) / config.experts * config.capacity_factor)) if config.drops else len(x)
    for position in range(len(x)):
        best = np.argsort(-probability[position])[: config.top_k]
        gates = probability[position][best]
        gates = gates / gates.sum() if config.top_k > 1 else gates
        counts[best] += 1
        chosen.append([(e, gate, bool(taken[e] < limit)) for e, gate in zip(best, gates, strict=True)])
        taken[best] += 1
    auxiliary = config.experts * (counts / counts.sum() * probability.mean(axis=0)).sum()
    z = (np.log(np.exp(logits).sum(axis=1)) ** 2).mean()
    return chosen, config.auxiliary_loss * auxiliary + config.z_loss * z


def routed(config, skew=0.0):
    """Router and rows whose first expert is `skew` more likely, and what the router makes of them."""
    random = np.random.default_rng(2)
    router, x = random.normal(size=(16, config.experts)), random.normal(size=(3, config.length, 16))
    x[:, :, 0], router[0] = 1.0, 0.0
    router[0, 0] = skew
    return router, x, jax.jit(lambda router, x: MixtureOfExperts(config, WHOLE).route(router, x))(router, x)


@pytest.mark.parametrize("skew", [0.0, 20.0])
@pytest.mark.parametrize(
    "config", [SMALL, replace(SMALL, top_k=1), replace(SMALL, capacity_factor=0.0), replace(SMALL, top_k=3)]
)
def test_routing_matches_numpy(config, skew, float64):
    router, x, routing = routed(config, skew)
    for row in range(len(x)):
        chosen, loss = reference_routing(config, router, x[row])
        expected = np.array(chosen)
        np.testing.assert_array_equal(routing.expert_BLk[row], expected[:, :, 0])
        np.testing.assert_allclose(routing.gate_BLk[row], expected[:, :, 1], rtol=1e-12)
        np.testing.assert_array_equal(routing.kept_BLk[row], expected[:, :, 2])
        np.testing.assert_allclose(routing.loss_B[row], loss, rtol=1e-12)


@pytest.mark.slow
def test_equal_shares_cost_the_least(float64):
    """The auxiliary loss is 1 where choices and probabilities are equal, nearly E / k where one expert takes all."""
    config = replace(SMALL, auxiliary_loss=1.0, z_loss=0.0, top_k=1)
    x = np.eye(4)[None, np.arange(12) % 4]
    even = MixtureOfExperts(config, WHOLE).route(jnp.asarray(np.eye(4)), jnp.asarray(x)).loss_B
    np.testing.assert_allclose(even, 1.0, rtol=1e-12)
    one = np.zeros((4, 4))
    one[:, 2] = 30.0
    np.testing.assert_allclose(
        MixtureOfExperts(config, WHOLE).route(jnp.asarray(one), jnp.asarray(x)).loss_B, 4.0, rtol=1e-6
    )


@pytest.mark.slow_cases("capacity")
@pytest.mark.parametrize(
    "config",
    [
        replace(SMALL, dropout=0.3),
        pytest.param(replace(SMALL, capacity_factor=0.0, top_k=1, tied=True), marks=pytest.mark.slow),
    ],
    ids=["capacity", "dropless"],
)
def test_loss_and_gradients_are_those_of_the_plain_one(config, float64):
    """Of dispatch, expert by expert, combine and the router, whose losses count; some choices have no place."""
    params, batch, key = make_params(config), make_batch(config, rows=2), jax.random.key(5)
    differentiate = jax.jit(jax.value_and_grad(lambda p: moe(config).loss(p, batch, key), has_aux=True))
    sums, gradients = differentiate(params)
    expected_sums, expected = reference.mixture.differentiate(config, params, batch, key)
    np.testing.assert_allclose(sums, expected_sums, rtol=1e-11)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11), gradients, expected)


@pytest.mark.slow
def test_first_parameters_are_those_of_the_plain_one():
    config = replace(SMALL, layers=3)
    found, expected = (
        init(jax.random.key(1)) for init in (jax.jit(moe(config).init), partial(reference.mixture.init, config))
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow
def test_the_losses_count_in_training_with_the_weight_of_their_row(float64):
    batch, params = make_batch(SMALL), make_params(SMALL)
    model, without, key = moe(SMALL), moe(replace(SMALL, auxiliary_loss=0.0, z_loss=0.0)), jax.random.key(0)
    evaluated = jax.jit(lambda: model.loss(params, batch, None)[0])()
    np.testing.assert_allclose(jax.jit(lambda: without.loss(params, batch, key)[0])(), evaluated, rtol=1e-12)

    def row_losses():
        x = model.embed({"embed": params["embed"]}, batch, key)
        for n in range(SMALL.layers):
            x = model.block(jax.tree.map(lambda leaf, n=n: leaf[n], params["blocks"]), x, key)
        return x["router_loss"]

    expected = evaluated + (jax.jit(row_losses)() * batch["weights"].sum(axis=1)).sum()
    np.testing.assert_allclose(jax.jit(lambda: model.loss(params, batch, key)[0])(), expected, rtol=1e-12)


@pytest.mark.slow
def test_rows_do_not_know_of_each_other(float64):
    """A row alone has the logits that it has among others: capacity and places are its own."""
    batch, params, model = make_batch(SMALL), make_params(SMALL), moe(SMALL)
    predict = jax.jit(model.predict)
    together = predict(params, batch)
    alone = predict(params, {"inputs": batch["inputs"][1:2]})
    np.testing.assert_allclose(alone[0], together[1], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_no_position_depends_on_a_later_one(float64):
    """Not even by taking its place with an expert: tokens after the sixth change, logits before do not."""
    params, tokens = make_params(SMALL), make_batch(SMALL)["inputs"]
    other = tokens.copy()
    other[:, 6:] = (other[:, 6:] + 1) % SMALL.vocabulary
    before, after = (jax.jit(moe(SMALL).predict)(params, {"inputs": each}) for each in (tokens, other))
    np.testing.assert_allclose(before[:, :6], after[:, :6], rtol=1e-12, atol=1e-12)
    assert np.abs(before[:, 6:] - after[:, 6:]).max() > 0.1


@pytest.mark.slow
def test_one_expert_is_the_transformer(float64):
    """With one expert and no limit, a mixture is an MLP."""
    config = replace(SMALL, experts=1, top_k=1, capacity_factor=0.0)
    params = make_params(config)
    dense = {**params["blocks"]["mlp"]}
    del dense["router"]
    dense = {name: leaf if name == "norm" else leaf[:, 0] for name, leaf in dense.items()}
    same = {**params, "blocks": {**params["blocks"], "mlp": dense}}
    known = {name: getattr(config, name) for name in vars(TransformerConfig())}
    transformer = load_model({"name": "transformer", **known})
    inputs = {"inputs": make_batch(config)["inputs"]}
    found, expected = jax.jit(moe(config).predict)(params, inputs), jax.jit(transformer.predict)(same, inputs)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_operations_count_the_chosen_experts():
    dense = TransformerConfig(vocabulary=23, length=10, layers=2, width=16, heads=4, mlp_width=24)
    more = 2 * (3 * 16 * 24 * (SMALL.top_k - 1) + 16 * SMALL.experts)
    assert SMALL.flops_per_row == dense.flops_per_row + 6 * more * 10
    assert moe(SMALL).flops_per_row == SMALL.flops_per_row


def test_capacity_rounds_up_and_ends_at_the_row():
    capacities = [replace(SMALL, capacity_factor=factor).capacity(10) for factor in (0.0, 0.1, 1.0, 1.25, 9.0)]
    assert capacities == [10, 1, 5, 7, 10]


@pytest.mark.slow
def test_by_name_and_writing_text():
    model = load_model({"name": "moe", "layers": 1, "width": 16, "experts": 2}, vocabulary=23, length=10)
    assert model.name == "moe"
    params = jax.jit(model.init)(jax.random.key(0))
    assert len(generate(model, params, [1, 2, 3], length=4, window=10)) == 7


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top_k": 9}, r"model\.top_k=9 must be at most model\.experts=8"),
        ({"norm": "layer"}, r"model\.norm=layer is only for the transformer: experts are swiglu"),
        ({"mlp_bias": True, "kv_heads": 3}, r"model\.kv_heads=3 does not divide .*\nmodel\.mlp_bias=True is only for"),
    ],
)
def test_rejects_invalid_moe_sizes(given, message):
    with pytest.raises(ValueError, match=message):
        MoEConfig(**given)


def test_an_expert_takes_what_its_capacity_allows_and_no_more(float64):
    """A router that likes one expert best everywhere: of 10 positions, 5 find it (2 * 10 / 4), the first ones."""
    _, _, routing = routed(SMALL, skew=20.0)
    assert SMALL.capacity(10) == 5
    np.testing.assert_array_equal(routing.expert_BLk[:, :, 0], 0)
    np.testing.assert_array_equal(routing.kept_BLk[:, :, 0], np.tile(np.arange(10) < 5, (3, 1)))
    _, _, dropless = routed(replace(SMALL, capacity_factor=0.0), skew=20.0)
    assert bool(dropless.kept_BLk.all())
