"""Biases add up like any sum, and backward reads them."""

import jax
import jax.numpy as jnp
import numpy as np
from spmdkit.models.layers.biases import add_biases

RANDOM = np.random.default_rng(0)


def weighted(add, x, bias, weight):
    return (jnp.tanh(add(x, bias)) * weight).sum()


def plain(x, bias):
    return x + bias[None, None, :]


def test_sums_and_gradients(float64):
    x, weight = RANDOM.normal(size=(2, 2, 3, 4))
    bias = RANDOM.normal(size=4)
    ours = jax.value_and_grad(lambda *own: weighted(lambda x, b: add_biases([x], [b])[0], *own, weight), (0, 1))
    theirs = jax.value_and_grad(lambda *own: weighted(plain, *own, weight), (0, 1))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), ours(x, bias), theirs(x, bias))


def test_backward_reads_the_bias():
    """The compiled gradient of a sum needs the bias as an argument, which that of a plain sum does not."""
    x, bias = jnp.ones((2, 3, 4)), jnp.ones(4)

    def arguments(add):
        gradient = jax.grad(lambda x, b: add(x, b).sum(), 1)
        kept = jax.jit(gradient).lower(x, bias).compile().as_text().partition("entry_computation_layout={(")[2]
        return kept.partition(")->")[0].count("f32[4]")

    assert arguments(plain) == 0
    assert arguments(lambda x, b: add_biases([x], [b])[0]) == 1


def test_a_bias_that_is_no_number_has_no_gradient():
    gradient = jax.grad(lambda b: add_biases([jnp.ones((1, 1, 2))], [b])[0].sum())(jnp.array([jnp.nan, 1.0]))
    np.testing.assert_array_equal(gradient, [np.nan, 1.0])
