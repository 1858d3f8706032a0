"""What has a gradient is told from what only travels along, and both are put together again."""

import jax
import jax.numpy as jnp
from spmdkit.parallel.blocks.differentiable import join_differentiable, split_differentiable

X = {"hidden": jnp.ones(2), "example": jnp.arange(3), "more": [jnp.ones(1, "bfloat16"), jnp.array([True])]}


def test_only_floats_have_a_gradient():
    differentiable, others = split_differentiable(X)
    assert [str(leaf.dtype) for leaf in differentiable] == ["float32", "bfloat16"]
    assert [str(leaf.dtype) for leaf in others] == ["int32", "bool"]
    differentiable, others = split_differentiable({"key": jax.random.key(0), "n": jnp.uint8(1)})
    assert (differentiable, len(others)) == ([], 2)


def test_both_are_put_together_in_their_places():
    differentiable, others = split_differentiable(X)
    joined = join_differentiable(X, [2 * leaf for leaf in differentiable], others)
    assert jax.tree.structure(joined) == jax.tree.structure(X)
    assert joined["hidden"].tolist() == [2, 2]
    assert joined["example"] is X["example"]
    assert joined["more"][1] is X["more"][1]
