"""Masks belong to rows: the same wherever a row is, other ones for other rows, layers and steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.models.adapters.row_dropout import drop

KEY, EXAMPLE = jax.random.key(3), jnp.arange(6, dtype=jnp.int32)
ONES = jnp.ones((6, 4, 50))


def test_a_row_keeps_its_mask_on_another_device():
    whole = drop(ONES, 0.5, KEY, EXAMPLE)
    part = drop(ONES[2:5], 0.5, KEY, EXAMPLE[2:5])
    np.testing.assert_array_equal(whole[2:5], part)
    np.testing.assert_array_equal(drop(ONES, 0.5, KEY, EXAMPLE[::-1]), whole[::-1])


def test_every_row_and_every_key_has_a_mask_of_its_own():
    rows = {np.asarray(row).tobytes() for key in (KEY, jax.random.key(4)) for row in drop(ONES, 0.5, key, EXAMPLE)}
    assert len(rows) == 12


def test_what_is_kept_is_scaled():
    """A quarter is dropped, and the mean stays: 1200 values deviate by 0.017."""
    dropped = np.asarray(drop(ONES, 0.25, KEY, EXAMPLE))
    assert set(np.unique(dropped).tolist()) == {0.0, np.float32(1 / 0.75)}
    assert abs((dropped == 0).mean() - 0.25) < 0.05
    np.testing.assert_array_equal(drop(ONES, 0.0, KEY, EXAMPLE), ONES)
    assert not drop(ONES, 1.0, KEY, EXAMPLE).any()


@pytest.mark.parametrize("dims", [(1,), (-2,)])
def test_dims_that_share_a_mask(dims):
    shared = np.asarray(drop(ONES, 0.5, KEY, EXAMPLE, dims))
    np.testing.assert_array_equal(shared, np.broadcast_to(shared[:, :1], shared.shape))
    assert len({row.tobytes() for row in shared[:, 0]}) == 6, "rows do not share it"


def test_rows_that_share_a_mask():
    shared = np.asarray(drop(ONES, 0.5, KEY, EXAMPLE, (0,)))
    assert shared.any()
    assert not shared.all()


def test_rows_and_a_further_dim_that_were_made_one():
    """Each row has 3 parts, one behind the other, with masks of their own."""
    folded = np.asarray(drop(jnp.ones((18, 50)), 0.5, KEY, EXAMPLE))
    np.testing.assert_array_equal(folded[3:6], drop(jnp.ones((3, 50)), 0.5, KEY, EXAMPLE[1:2]))
    assert len({row.tobytes() for row in folded}) == 18
    with pytest.raises(ValueError, match=r"shape \(16, 50\) for 6 rows: dim 0 has to be a multiple"):
        drop(jnp.ones((16, 50)), 0.5, KEY, EXAMPLE)
