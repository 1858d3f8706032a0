"""Tests."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.models.attention import causal_attention, rotate


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


@pytest.mark.slow
def test_gradients_equal_those_of_jax_nn():
    query, key, value = normal(2, 130, 4, 8), normal(2, 130, 2, 8, seed=1), normal(2, 130, 2, 8, seed=2)
    ours = jax.grad(lambda *x: jnp.sum(causal_attention(*x) ** 2), argnums=(0, 1, 2))
    theirs = jax.grad(lambda *x: jnp.sum(jax.nn.dot_product_attention(*x, is_causal=True) ** 2), argnums=(0, 1, 2))
    for mine, expected in zip(jax.jit(ours)(query, key, value), jax.jit(theirs)(query, key, value), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_scores_are_never_narrower_than_float32():
    """In bfloat16 a score of 300 would be off by up to 1, which is a factor of e in the weight."""
    query, key = (jnp.full((1, 2, 1, 2), x, jnp.bfloat16) for x in (14.5, 14.625))
    value = jnp.asarray([[[[1.0, 1.0]], [[2.0, 2.0]]]], jnp.bfloat16)
    mixed = causal_attention(query, key, value)
    assert mixed.dtype == jnp.bfloat16
    np.testing.assert_allclose(mixed[0, 1, 0], 1.5, rtol=1e-2)


@pytest.mark.slow
def test_full_precision_in_float64(float64):
    query, key, value = (np.asarray(normal(1, 70, 2, 4, seed=seed), np.float64) for seed in range(3))
    mixed = causal_attention(*map(jnp.asarray, (query, key, value)))
    assert mixed.dtype == jnp.float64
    np.testing.assert_allclose(mixed, plain_attention(query, key, value), rtol=1e-12)


@pytest.mark.slow
def test_rotation_keeps_lengths_and_position_0():
    x = normal(2, 5, 3, 8)
    rotated = rotate(jnp.asarray(x), 100.0)
    np.testing.assert_allclose(np.linalg.norm(rotated, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)
    np.testing.assert_array_equal(rotated[:, 0], x[:, 0])
    assert (np.abs(rotated[:, 1:] - x[:, 1:]).max(axis=-1) > 0.1).all()


@pytest.mark.slow
def test_rotated_products_depend_on_the_distance_alone():
    query, key = (jnp.broadcast_to(jnp.asarray(normal(1, 1, 1, 8, seed=seed)), (1, 20, 1, 8)) for seed in (0, 1))
    products = jnp.einsum("blhk,bmhk->lm", rotate(query, 10000.0), rotate(key, 10000.0))
    for distance in range(1, 10):
        diagonal = np.diagonal(products, offset=-distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-3, atol=1e-4)
    assert np.ptp(products[-1]) > 0.1


@pytest.mark.slow
def test_rotation_is_computed_wide():
    x = jnp.ones((1, 300, 1, 4), jnp.bfloat16)
    exact = rotate(x.astype(jnp.float32), 10000.0)
    assert rotate(x, 10000.0).dtype == jnp.bfloat16
    np.testing.assert_allclose(rotate(x, 10000.0).astype(np.float32), exact, atol=0.01)


@pytest.mark.slow
def test_rotation_by_given_positions():
    """Positions of a row's second half, and positions that restart in the second row."""
    x = jnp.asarray(normal(2, 8, 3, 4))
    whole = rotate(x, 100.0)
    np.testing.assert_array_equal(rotate(x[:, 4:], 100.0, jnp.arange(4, 8)), whole[:, 4:])
    position = jnp.asarray([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 0, 1, 2, 3, 4]])
    restarted = rotate(x, 100.0, position)
    np.testing.assert_array_equal(restarted[0], whole[0])
    np.testing.assert_array_equal(restarted[1, 3:], rotate(x[1:, 3:], 100.0)[0])


def documents_apart(*arrays):
    """Attention of each document of each row of `SEGMENTS` on its own, put together again."""
    rows = []
    for row, segments in enumerate(SEGMENTS):
        bounds = [0, *(np.flatnonzero(np.diff(segments)) + 1), segments.size]
        documents = [[x[row : row + 1, a:b] for x in arrays] for a, b in itertools.pairwise(bounds)]
        rows.append(jnp.concatenate([causal_attention(*document) for document in documents], axis=1))
    return jnp.concatenate(rows)


SEGMENTS = np.stack([np.arange(130) // 50, np.arange(130) >= 64]).astype(np.int32)


@pytest.mark.slow
def test_packed_documents_are_as_if_apart(float64):
    query, key, value, gradient = (
        jnp.asarray(normal(2, 130, heads, 8, seed=seed), jnp.float64) for seed, heads in enumerate((4, 2, 2, 4))
    )

    def packed(*arrays):
        return causal_attention(*arrays, jnp.asarray(SEGMENTS))

    def out_and_gradients(attention):
        out, backward = jax.vjp(attention, query, key, value)
        return out, *backward(gradient)

    results = (jax.jit(out_and_gradients, static_argnums=0)(each) for each in (packed, documents_apart))
    for mine, expected in zip(*results, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-12)
