import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from spmdkit.models.mlp import MLPConfig, mlp
from support import toy

CONFIG = MLPConfig(features=6, classes=3, widths=(8, 5))
RANDOM = np.random.default_rng(0)
BATCH = toy.labelled(RANDOM, 16, 6, classes=3, dtype="float32")


@pytest.mark.slow
def test_first_parameters_loss_and_gradients_are_those_of_the_plain_one(float64):
    key, plain = jax.random.key(2), reference.mlp
    drawn = plain.init(CONFIG, key)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(mlp(CONFIG).init)(key), drawn)
    params = jax.tree.map(lambda leaf: np.float64(leaf) + 0.1, drawn)
    batch = {**BATCH, "weights": RANDOM.random(16)}
    found = jax.jit(jax.value_and_grad(lambda p: mlp(CONFIG).loss(p, batch, None), has_aux=True))(params)
    expected = plain.differentiate(CONFIG, params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), found, expected)


def test_linear_classifier_and_flops():
    linear = MLPConfig(features=6, classes=300, widths=())
    params = mlp(linear).init(jax.random.key(0))
    assert jax.tree.map(jnp.shape, params) == {"layers": [{"kernel": (6, 300), "bias": (300,)}]}
    assert np.std(params["layers"][0]["kernel"]) == pytest.approx((2 / 6) ** 0.5, rel=0.1), "by the features"
    assert mlp(linear).flops_per_row == 6 * 6 * 300
    assert CONFIG.flops_per_row == 6 * (6 * 8 + 8 * 5 + 5 * 3)


@pytest.mark.slow
def test_bfloat16_gives_float32_losses():
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), mlp(CONFIG).init(jax.random.key(0)))
    total, weight = mlp(CONFIG).loss(params, BATCH, None)
    assert (total.dtype, weight.dtype) == (jnp.float32, jnp.float32)


def test_rejects_unknown_sizes():
    with pytest.raises(ValueError, match=r"model.features is missing.*\nmodel.classes is missing"):
        mlp(MLPConfig())
