"""Blocks in the order in which stages store them, and back in the model's own order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from spmdkit.parallel.model import BlockModel
from spmdkit.parallel.schedule.builders import make_schedule
from spmdkit.parallel.schedule.stages import assign
from spmdkit.parallel.sharding.stored_order import StoredOrder, in_stage_order, store_blocks, unstore_blocks


def stages(num_blocks, name="1f1b", size=2, layers=()):
    return assign(num_blocks, make_schedule(name, size, 2 * size), layers)


@pytest.mark.parametrize("arguments", [(4, "1f1b"), (5, "1f1b"), (5, "zbv"), (3, "1f1b", 2, (3, 0))])
def test_storage_and_back_is_the_same(arguments):
    made = stages(*arguments)
    blocks = {"w": jnp.arange(1, arguments[0] * 3 + 1).reshape(arguments[0], 3), "b": jnp.arange(1, arguments[0] + 1)}
    stored = store_blocks(blocks, made)
    np.testing.assert_array_equal(stored["b"], np.maximum(made.order, -1) + 1)  # filled up with 0
    assert stored["w"].shape == (len(made.order), 3)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, unstore_blocks(stored, made), blocks))
    assert (stored is blocks) == made.is_natural


def test_state_without_stages_stays_as_it_is():
    tree = {"blocks": jnp.ones(3)}
    for given in (None, stages(4)):
        order = StoredOrder(given)
        assert order.to_model(tree) is tree
        assert order.to_stored(tree, tree) is tree
        assert order.abstract_model(tree) is tree


def test_a_model_whose_init_stores_its_blocks_stage_by_stage():
    """Its other functions stay; a model of one function, or without stages, is the very same."""
    given, made = toy.BLOCK_MODEL, stages(3, "1f1b", 2, (1, 2))
    stored = in_stage_order(given, made)
    assert isinstance(stored, BlockModel)
    assert stored.block is given.block
    blocks = given.init(jax.random.key(0))["blocks"]
    expected = jax.tree.map(np.asarray, store_blocks(blocks, made))
    assert jax.tree.all(jax.tree.map(np.array_equal, stored.init(jax.random.key(0))["blocks"], expected))
    assert in_stage_order(given, None) is given
    assert in_stage_order(given, stages(4)) is given
    assert in_stage_order(toy.PLAIN_MODEL, made) is toy.PLAIN_MODEL
