"""Losses of rows by their formulas, and their weighted sums."""

import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.models.adapters.row_loss import accuracy, row_function, sigmoid_cross_entropy, squared_error, sums

OUTPUTS = np.array([[1.0, -2.0], [0.5, 0.0], [3.0, 1.0]], np.float32)
TARGETS = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], np.float32)
BATCH = {"targets": jnp.asarray(TARGETS)}


def test_a_row_counts_the_mean_of_its_elements():
    np.testing.assert_allclose(squared_error(OUTPUTS, BATCH), ((OUTPUTS - TARGETS) ** 2).mean(1), rtol=1e-6)
    likely = np.where(TARGETS == 1, 1 / (1 + np.exp(-OUTPUTS)), 1 / (1 + np.exp(OUTPUTS)))
    np.testing.assert_allclose(sigmoid_cross_entropy(OUTPUTS, BATCH), -np.log(likely).mean(1), rtol=1e-5)


def test_one_logit_stands_for_class_1_above_0():
    batch = {"targets": jnp.array([0.0, 0.3, 1.0, 1.0])}
    found = accuracy(jnp.array([[-1.0], [-1.0], [0.2], [-2.0]]), batch)
    assert found.tolist() == [True, True, True, False]


def test_accuracy_compares_the_largest_logit_of_each_position():
    logits = jnp.eye(4)[jnp.array([[0, 1, 2], [3, 3, 0]])]
    found = accuracy(logits, {"targets": jnp.array([[0, 1, 1], [3, 2, 0]])})
    assert found.tolist() == [[True, True, False], [True, False, True]]


def test_weights_are_of_rows_or_of_positions():
    losses = np.arange(6.0, dtype=np.float32).reshape(3, 2)
    plain = {"inputs": jnp.zeros((3, 5))}
    rows, positions = jnp.array([1.0, 0.0, 2.0]), jnp.array([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])

    def summed(batch):
        return tuple(map(float, sums(lambda outputs, batch: jnp.asarray(outputs), losses, batch, "loss")))

    assert summed(plain) == (15.0, 6.0)
    assert summed({**plain, "weights": rows}) == (1.0 + 2 * 9.0, 6.0)
    assert summed({**plain, "weights": positions}) == (9.0, 3.0)


def test_rejects_losses_not_per_row():
    with pytest.raises(UserError, match=r"loss returned an array of shape \(\) for 3 rows"):
        sums(lambda outputs, batch: jnp.mean(outputs), OUTPUTS, BATCH, "loss")
    with pytest.raises(UserError, match=r"of shape \(3,\), and the batch has weights of shape \(3, 2\)"):
        sums(lambda outputs, batch: outputs[:, 0], OUTPUTS, {"weights": TARGETS}, "loss")
    with pytest.raises(UserError, match=r"loss='squared_eror' is not a valid loss. Did you mean squared_error"):
        row_function("squared_eror", "loss")
