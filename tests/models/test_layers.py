"""Layers: values, dtypes, and what backward keeps; their formulas are in test_reference.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.models.attention import Slowing
from spmdkit.models.layers import add_biases, cross_entropy, dropout, layer_norm, recompute, rms_norm, truncated_normal

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


@pytest.mark.slow
def test_large_logits_stay_finite():
    total, _ = cross_entropy(jnp.array([[1e4, -1e4]]), jnp.array([1]), jnp.array([1.0]))
    np.testing.assert_allclose(total, 2e4)


KEY = jax.random.key(0)


def test_standard_deviation_and_bounds():
    drawn = np.asarray(truncated_normal(KEY, "w", (400, 500), 0.3))
    assert drawn.dtype == np.float32
    np.testing.assert_allclose(drawn.std(), 0.3, rtol=0.01)
    np.testing.assert_allclose(drawn.mean(), 0, atol=0.01)
    assert np.abs(drawn).max() <= 2 * 0.3 / 0.879


def test_depends_on_the_name_and_the_key(float64):
    draws = [truncated_normal(KEY, name, (4,), 1.0) for name in "aba"]
    draws.append(truncated_normal(jax.random.key(1), "a", (4,), 1.0))
    assert len({np.asarray(drawn).tobytes() for drawn in draws}) == 3
    assert {str(drawn.dtype) for drawn in draws} == {"float32"}, "whatever the default"


X_NORMS = np.random.default_rng(0).normal(2.0, 3.0, (2, 3, 8)).astype(np.float32)
SCALE, BIAS = np.random.default_rng(1).normal(size=(2, 8)).astype(np.float32)
EPSILON = 0.5
"""So large that its place in the formula shows."""


def by_hand(x, scale, bias=None):
    wide = x.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True) if bias is not None else wide
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON) * scale + (0 if bias is None else bias)


def test_formulas():
    np.testing.assert_allclose(rms_norm(X_NORMS, SCALE, EPSILON), by_hand(X_NORMS, SCALE), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        layer_norm(X_NORMS, SCALE, BIAS, EPSILON), by_hand(X_NORMS, SCALE, BIAS), rtol=1e-5, atol=1e-6
    )


X_RECOMPUTE, Y = (np.random.default_rng(seed).normal(size=(3, 4)).astype(np.float32) for seed in (0, 1))


def function(x, y):
    return jnp.tanh(jnp.exp(x) * y) * y


def test_value_and_gradient():
    closed = recompute(function)
    np.testing.assert_array_equal(closed(X_RECOMPUTE, Y), function(X_RECOMPUTE, Y))
    mine, expected = (
        jax.grad(lambda x, y, f=f: jnp.sum(f(x, y)), argnums=(0, 1))(X_RECOMPUTE, Y) for f in (closed, function)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), mine, expected)


def test_backward_keeps_the_arguments_alone():
    """Also inside a checkpoint that would keep everything."""

    def outer(f):
        block = jax.checkpoint(lambda x, y: jnp.sin(f(x, y)), policy=jax.checkpoint_policies.everything_saveable)
        return jax.jit(lambda x, y: jax.vjp(block, x, y)[1])

    closed, opened = (
        len(jax.tree.leaves(jax.eval_shape(outer(f), X_RECOMPUTE, Y))) for f in (recompute(function), function)
    )
    assert closed <= 4 < opened


@pytest.mark.slow
def test_a_mask_belongs_to_its_position():
    rows, example, held = jnp.ones((2, 8, 16)), jnp.array([7, 8], jnp.int32), jnp.array([0, 1, 6, 7])
    whole = dropout(rows, example, jnp.arange(8), KEY, name="mlp", rate=0.25)
    part = dropout(rows[:, :4], example, held, KEY, name="mlp", rate=0.25)
    np.testing.assert_array_equal(part, whole[:, held])


def test_each_place_of_a_block_draws_its_own_mask():
    rows, example, draw = jnp.ones((2, 8, 16)), jnp.array([7, 8], jnp.int32), jax.jit(dropout, static_argnames="name")
    masks = [draw(rows, example, jnp.arange(8), KEY, name=name, rate=0.25) > 0 for name in ("attention", "mlp")]
    assert 0.2 < (masks[0] != masks[1]).mean() < 0.55


def test_slows_frequencies_with_few_turns():
    turns = np.array([0.5, 1.0, 2.5, 4.0, 9.0])  # in the 10 positions of the first length
    slowed = Slowing(factor=8.0, length=10, slow_turns=1.0, fast_turns=4.0).apply(jnp.asarray(2 * np.pi * turns / 10))
    np.testing.assert_allclose(slowed * 10 / (2 * np.pi), turns / [8, 8, 16 / 9, 1, 1], rtol=1e-6)
