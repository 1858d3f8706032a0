"""Slices of queries; `test_ring.py` compares the numbers with one device, in slices too."""

import jax
import numpy as np
import pytest
from spmdkit.parallel.blocks.attention import online_softmax


@pytest.mark.parametrize(("length", "slices"), [(1, 1), (1024, 1), (1025, 5), (2048, 2), (3000, 3)])
def test_slices_are_few_and_equal(length, slices):
    assert online_softmax._num_slices(length) == slices


def test_gradients_of_all_slices_are_summed(monkeypatch):
    monkeypatch.setattr(online_softmax, "SLICE", 2)
    random = np.random.default_rng(0)
    query, gradient = (random.normal(size=(1, 2, 1, 6, 4)).astype(np.float32) for _ in range(2))
    key, value = (random.normal(size=(1, 2, 5, 4)).astype(np.float32) for _ in range(2))

    def plain(query, key, value):
        return jax.nn.softmax(query @ key[:, :, None].mT / 2) @ value[:, :, None]

    @jax.jit
    def by_slices(query, key, value, gradient):
        every = online_softmax.Marks()
        out, log_weight = online_softmax.finish(online_softmax.attend(query, key, value, every, every))
        saved = online_softmax.Saved(query, gradient, log_weight, (out * gradient).sum(-1))
        return online_softmax.attend_backward(saved, key, value, every, every)

    expected = jax.jit(lambda *arrays: jax.vjp(plain, *arrays)[1](gradient))(query, key, value)
    for found, wanted in zip(by_slices(query, key, value, gradient), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
