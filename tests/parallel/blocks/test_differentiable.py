"""What has a gradient is told from what only travels along, and both are put together again."""

import jax
import jax.numpy as jnp
import pytest
from spmdkit.parallel.blocks.differentiable import join_differentiable, split_differentiable

X = {"hidden": jnp.ones(2), "example": jnp.arange(3), "more": [jnp.ones(1, "bfloat16"), jnp.array([True])]}


def shapes(leaves):
    return [(leaf.shape, str(leaf.dtype)) for leaf in leaves]


def test_floats_of_every_width_have_a_gradient():
    differentiable, others = split_differentiable(X)
    assert shapes(differentiable) == [((2,), "float32"), ((1,), "bfloat16")]
    assert shapes(others) == [((3,), "int32"), ((1,), "bool")]


def test_keys_and_whole_numbers_have_none():
    differentiable, others = split_differentiable({"key": jax.random.key(0), "n": jnp.uint8(1)})
    assert differentiable == []
    assert len(others) == 2


def test_both_are_put_together_in_their_places():
    differentiable, others = split_differentiable(X)
    joined = join_differentiable(X, [2 * leaf for leaf in differentiable], others)
    assert jax.tree.structure(joined) == jax.tree.structure(X)
    assert joined["hidden"].tolist() == [2, 2]
    assert joined["example"] is X["example"]
    assert joined["more"][1] is X["more"][1]


def test_too_few_leaves_are_not_made_up():
    with pytest.raises((StopIteration, RuntimeError)):
        join_differentiable(X, [], [])
