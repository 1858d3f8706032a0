import jax
import jax.numpy as jnp
import numpy as np
from spmdkit.models.layers.dropout import dropout

KEY = jax.random.key(0)


def drop(rows, example, positions=None, *, key=KEY, name="mlp", rate=0.25):
    positions = jnp.arange(rows.shape[1]) if positions is None else positions
    return np.asarray(dropout(rows, jnp.asarray(example, jnp.int32), positions, key, name=name, rate=rate))


def test_rate_and_scale():
    dropped = drop(jnp.ones((4, 64, 64)), range(4))
    assert set(np.unique(dropped)) == {0.0, np.float32(1 / 0.75)}
    np.testing.assert_allclose((dropped == 0).mean(), 0.25, atol=0.01)
    np.testing.assert_allclose(dropped.mean(), 1.0, atol=0.02)


def test_a_mask_belongs_to_its_example():
    rows = jnp.ones((3, 8, 16))
    together = drop(rows, [7, 8, 9])
    np.testing.assert_array_equal(drop(rows[:1], [8])[0], together[1])
    np.testing.assert_array_equal(drop(rows, [9, 7, 8]), together[[2, 0, 1]])


def test_a_mask_belongs_to_its_position():
    rows = jnp.ones((2, 8, 16))
    whole = drop(rows, [7, 8])
    held = jnp.asarray([0, 1, 6, 7])
    np.testing.assert_array_equal(drop(rows[:, :4], [7, 8], held), whole[:, held])


def test_masks_differ_between_examples_places_and_keys():
    rows = jnp.ones((1, 8, 16))
    masks = [
        drop(rows, [7]),
        drop(rows, [8]),
        drop(rows, [7], name="attention"),
        drop(rows, [7], key=jax.random.key(1)),
    ]
    assert len({mask.tobytes() for mask in masks}) == len(masks)


def test_keeps_the_dtype():
    rows, example = jnp.ones((1, 2, 4), jnp.bfloat16), jnp.zeros(1, jnp.int32)
    assert dropout(rows, example, jnp.arange(2), KEY, name="", rate=0.5).dtype == jnp.bfloat16
