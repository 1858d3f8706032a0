"""The mixture of experts against a plain one: routing, capacity, losses, and what a whole block adds."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import reference
from spmdkit.models import generate, load_model
from spmdkit.models.moe import MixtureOfExperts, MoEConfig, moe
from spmdkit.models.transformer import WHOLE, TransformerConfig
from spmdkit.parallel.collectives import Collective
from spmdkit.parallel.context import ContextConfig
from spmdkit.parallel.model import ParallelContext
from spmdkit.parallel.tensor import TensorConfig
from support.small_transformers import make_batch

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


def routed(config, skew=0.0, parallel=WHOLE):
    """Router and rows whose first expert is `skew` more likely, and what the router makes of them."""
    random = np.random.default_rng(2)
    router, x = random.normal(size=(16, config.experts)), random.normal(size=(3, config.length, 16))
    x[:, :, 0], router[0] = 1.0, 0.0
    router[0, 0] = skew
    return router, x, jax.jit(lambda router, x: MixtureOfExperts(config, parallel).route(router, x))(router, x)


def test_devices_along_tensor_share_the_losses_of_their_rows():
    whole, half = (
        routed(SMALL, parallel=each)[2].loss_B for each in (WHOLE, ParallelContext(tensor=TensorConfig(size=2)))
    )
    np.testing.assert_allclose(2 * half, whole, rtol=1e-6)


def test_devices_along_context_gather_the_choices_of_their_rows():
    """2 experts of 4 bytes for each of 3 rows x 5 positions."""
    parallel, shape = ParallelContext(context=ContextConfig(size=2)), jax.ShapeDtypeStruct((3, 5), np.int32)
    moved = MixtureOfExperts(SMALL, parallel).traffic("block", {"inputs": shape}, "float32", "cpu")
    choices = Collective("all-gather", ("context",), 1, 3 * 5 * 2 * 4)
    assert choices in moved.forward
    assert choices not in moved.backward


@pytest.mark.parametrize("skew", [0.0, 20.0])
@pytest.mark.parametrize(
    "config", [SMALL, replace(SMALL, top_k=1), replace(SMALL, capacity_factor=0.0), replace(SMALL, top_k=3)]
)
def test_routing_is_that_of_the_plain_one(config, skew, float64):
    """With a skewed router, the first positions of a row fill the first expert."""
    router, x, routing = routed(config, skew)
    expert, gate, kept, loss = reference.mixture.route(config, router, x)
    np.testing.assert_array_equal(routing.expert_BLk, expert)
    np.testing.assert_allclose(routing.gate_BLk, gate, rtol=1e-12)
    np.testing.assert_array_equal(routing.kept_BLk, kept)
    np.testing.assert_allclose(routing.loss_B, loss, rtol=1e-12)
    assert skew == 0 or not config.drops or not kept.all()


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
def test_the_losses_do_not_count_in_evaluation(float64):
    batch, params = make_batch(SMALL, rows=2), make_params(SMALL)
    found = jax.jit(moe(SMALL).loss)(params, batch, None)
    np.testing.assert_allclose(found, reference.mixture.loss(SMALL, params, batch), rtol=1e-11)


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
