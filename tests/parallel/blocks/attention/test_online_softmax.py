"""Parts of attention over some of the keys add up to attention over all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.parallel.blocks.attention import online_softmax
from spmdkit.parallel.blocks.attention.online_softmax import Marks, Saved, attend, attend_backward, finish, merge
from support import toy

B, G, R, S, T, K = 2, 2, 3, 6, 8, 4


def arrays():
    random = np.random.default_rng(0)
    shapes = (B, G, R, S, K), (B, G, T, K), (B, G, T, K), (B, G, R, S, K)
    return [jnp.asarray(random.normal(size=shape)) for shape in shapes]


ROW_POSITION, COLUMN_POSITION = np.arange(2, 2 + S, dtype=np.int32), np.arange(T, dtype=np.int32)
ROW_SEGMENT = np.array([[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 0]], np.int32)
COLUMN_SEGMENT = np.array([[0, 0, 0, 0, 0, 1, 1, 2], [0] * 8], np.int32)


def plain(query, key, value):
    score = jnp.einsum("BGRSK,BGTK->BGRST", query, key) * K**-0.5
    visible = (ROW_POSITION[:, None] >= COLUMN_POSITION[None]) & (ROW_SEGMENT[:, :, None] == COLUMN_SEGMENT[:, None])
    weight = jax.nn.softmax(jnp.where(visible[:, None, None], score, -jnp.inf), axis=-1)
    return jnp.einsum("BGRST,BGTK->BGRSK", weight, value)


def marks(columns=slice(None)):
    rows = Marks(jnp.asarray(ROW_POSITION), jnp.asarray(ROW_SEGMENT))
    return rows, Marks(jnp.asarray(COLUMN_POSITION[columns]), jnp.asarray(COLUMN_SEGMENT[:, columns]))


def test_parts_are_the_whole_in_any_order(float64):
    """In row 0, the first two queries see none of the later keys, and the last three none of the earlier ones."""

    @jax.jit
    def run(query, key, value):
        early, late = (
            attend(query, key[:, :, part], value[:, :, part], *marks(part)) for part in (slice(0, 4), slice(4, 8))
        )
        return plain(query, key, value), finish(merge(early, late))[0], finish(merge(late, early))[0]

    whole, *merged = run(*arrays()[:3])
    for out in merged:
        assert toy.relative(out, whole) < 1e-14


@pytest.mark.slow_cases("1024")
@pytest.mark.parametrize("slice_size", [1024, 2])
def test_outputs_and_gradients_in_slices(float64, monkeypatch, slice_size):
    monkeypatch.setattr(online_softmax, "SLICE", slice_size)
    query, key, value, gradient = arrays()

    @jax.jit
    def run(query, key, value, gradient):
        whole, backward = jax.vjp(plain, query, key, value)
        out, log_weight = finish(attend(query, key, value, *marks()))
        saved = Saved(query, gradient, log_weight, jnp.sum(out * gradient, axis=-1))
        return (out, *attend_backward(saved, key, value, *marks())), (whole, *backward(gradient))

    for mine, expected in zip(*run(query, key, value, gradient), strict=True):
        assert toy.relative(mine, expected) < 1e-14


@pytest.mark.parametrize(("length", "slices"), [(1, 1), (1024, 1), (1025, 5), (2048, 2), (3000, 3)])
def test_slices_are_few_and_equal(length, slices):
    assert online_softmax._num_slices(length) == slices
