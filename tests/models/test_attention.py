"""Attention of every number of slices; gradients, documents and rotations are in test_reference.py."""

import jax
import numpy as np
import pytest
from spmdkit.models.attention import causal_attention


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def plain_attention(query, key, value):
    """One einsum over the full square, key-value heads repeated."""
    repeats = query.shape[2] // key.shape[2]
    key, value = (np.repeat(x, repeats, axis=2) for x in (key, value))
    scores = np.einsum("blhk,bmhk->bhlm", query, key) / np.sqrt(query.shape[-1])
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("bhlm,bmhk->blhk", weights / weights.sum(axis=-1, keepdims=True), value)


# One slice, exactly two, a ragged last one, four larger than the smallest.
@pytest.mark.parametrize("length", [1, 63, 128, 130, 300])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_equals_the_full_square(length, heads, kv_heads):
    query, key, value = (
        normal(2, length, heads, 8),
        normal(2, length, kv_heads, 8, seed=1),
        normal(2, length, kv_heads, 8),
    )
    np.testing.assert_allclose(
        jax.jit(causal_attention)(query, key, value), plain_attention(query, key, value), rtol=1e-4, atol=1e-5
    )
