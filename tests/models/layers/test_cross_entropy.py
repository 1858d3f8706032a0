import jax
import jax.numpy as jnp
import numpy as np
from spmdkit.models.layers.cross_entropy import cross_entropy

random = np.random.default_rng(0)
LOGITS = random.normal(size=(3, 5, 7)).astype(np.float32)
TARGETS = random.integers(0, 7, (3, 5)).astype(np.int32)
WEIGHTS = np.array([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0.5]], np.float32)


def test_sum_and_weight():
    total, weight = cross_entropy(LOGITS, TARGETS, WEIGHTS)
    expected = -np.take_along_axis(np.asarray(jax.nn.log_softmax(LOGITS)), TARGETS[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(total, (expected * WEIGHTS).sum(), rtol=1e-6)
    assert weight == 7.5


def test_pieces_add_up_to_the_whole():
    whole = cross_entropy(LOGITS, TARGETS, WEIGHTS)
    pieces = [cross_entropy(LOGITS[row], TARGETS[row], WEIGHTS[row]) for row in range(3)]
    np.testing.assert_allclose(np.sum(pieces, axis=0), whole, rtol=1e-6)


def test_large_logits_stay_finite():
    total, _ = cross_entropy(jnp.array([[1e4, -1e4]]), jnp.array([1]), jnp.array([1.0]))
    np.testing.assert_allclose(total, 2e4)


def test_gradient_is_weighted_softmax_minus_one_hot():
    gradient = jax.grad(lambda logits: cross_entropy(logits, TARGETS, WEIGHTS)[0])(LOGITS)
    expected = (np.asarray(jax.nn.softmax(LOGITS)) - np.eye(7)[TARGETS]) * WEIGHTS[..., None]
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_weights_take_the_dtype_of_the_logits(float64):
    total, weight = cross_entropy(LOGITS.astype(np.float64), TARGETS, WEIGHTS)
    assert (total.dtype, weight.dtype) == (jnp.float64, jnp.float64)
