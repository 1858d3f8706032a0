import jax
import jax.numpy as jnp
import numpy as np
from spmdkit.models.recompute import recompute

X, Y = (np.random.default_rng(seed).normal(size=(3, 4)).astype(np.float32) for seed in (0, 1))


def function(x, y):
    return jnp.tanh(jnp.exp(x) * y) * y


def test_value_and_gradient():
    closed = recompute(function)
    np.testing.assert_array_equal(closed(X, Y), function(X, Y))
    mine, expected = (jax.grad(lambda x, y, f=f: jnp.sum(f(x, y)), argnums=(0, 1))(X, Y) for f in (closed, function))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), mine, expected)


def test_backward_keeps_the_arguments_alone():
    """Also inside a checkpoint that would keep everything."""

    def outer(f):
        block = jax.checkpoint(lambda x, y: jnp.sin(f(x, y)), policy=jax.checkpoint_policies.everything_saveable)
        return jax.jit(lambda x, y: jax.vjp(block, x, y)[1])

    closed, opened = (len(jax.tree.leaves(jax.eval_shape(outer(f), X, Y))) for f in (recompute(function), function))
    assert closed <= 4 < opened
