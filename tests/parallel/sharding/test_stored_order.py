"""Blocks in the order in which stages store them, and back in the model's own order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from spmdkit.parallel.model import BlockModel
from spmdkit.parallel.schedule.builders import make_schedule
from spmdkit.parallel.schedule.stages import assign
from spmdkit.parallel.sharding.stored_order import (
    StoredOrder,
    in_stage_order,
    store_blocks,
    stored_order,
    unstore_blocks,
)
from support import toy


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


@pytest.mark.parametrize("strategy", [{"data": 2}, {"pipe": 3}])
def test_parameters_of_no_stages_or_natural_ones_stay_as_they_are(strategy):
    tree = {"blocks": jnp.ones(3)}
    order = stored_order(toy.plan(strategy))
    assert order == StoredOrder()
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


def order(blocks, name="zbv"):
    return StoredOrder(assign(blocks, make_schedule(name, 2, 4), ()))


def placed(array, *spec):
    sharding = NamedSharding(toy.mesh(pipe=2).backend_mesh, PartitionSpec(*spec))
    return jax.device_put(jnp.asarray(array), sharding)


def test_rows_of_blocks_are_put_in_order_and_back():
    """Four blocks down two stages and up again: stored 0 3 1 2."""
    stored = {"blocks": {"up": placed([0.0, 3, 1, 2], "pipe")}, "head": placed([7.0, 8], None)}
    found = order(4).to_model(stored)
    assert found["blocks"]["up"].tolist() == [0, 1, 2, 3]
    assert found["head"] is stored["head"]
    back = order(4).to_stored(found, stored)
    assert back["blocks"]["up"].tolist() == [0, 3, 1, 2]
    assert back["blocks"]["up"].sharding == stored["blocks"]["up"].sharding


def test_what_fills_up_a_stage_is_dropped_and_no_longer_split():
    """Five blocks in eight rows: 0 1 4 - 2 - 3 -; 2 stages divide no 5."""
    stored = {"blocks": {"up": placed([0.0, 1, 4, 9, 2, 9, 3, 9], "pipe")}}
    found = order(5).to_model(stored)["blocks"]["up"]
    assert found.tolist() == [0, 1, 2, 3, 4]
    assert found.sharding.spec == PartitionSpec(None)
    abstract = order(5).abstract_model(stored)["blocks"]["up"]
    assert (abstract.shape, abstract.dtype, abstract.sharding) == (found.shape, found.dtype, found.sharding)
    back = order(5).to_stored({"blocks": {"up": found}}, stored)["blocks"]["up"]
    assert np.asarray(back)[[0, 1, 2, 4, 6]].tolist() == [0, 1, 4, 2, 3]


def test_blocks_may_be_counted_by_another_dim_or_by_several():
    stored = placed(np.array([[0.0, 3, 1, 2]] * 3), None, "pipe")
    assert order(4).leaf_to_model(stored, (1,)).tolist() == [[0, 1, 2, 3]] * 3
    pairs = jnp.add.outer(10 * jnp.array([0, 3, 1, 2]), jnp.array([0, 3, 1, 2]))
    assert order(4).leaf_to_model(pairs, (0, 1)).tolist() == [
        [10 * row + column for column in range(4)] for row in range(4)
    ]


def test_arrays_of_the_host_are_put_in_order_on_the_host():
    found = order(4).to_model({"blocks": np.array([0.0, 3, 1, 2])})["blocks"]
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [0, 1, 2, 3]
