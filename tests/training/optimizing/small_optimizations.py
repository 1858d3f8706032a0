"""Parameters like those of a model of blocks, and small optimizations of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from spmdkit.training.optimizing.optimizers import make_optimizer


def stacked_params(seed=0):
    """A tree like a BlockModel's: two blocks of a matrix and a norm."""
    random = np.random.default_rng(seed)
    shapes = {"embed": {"tokens": (6, 4)}, "blocks": {"kernel": (2, 4, 8), "norm": (2, 4)}, "head": {"logits": (4, 6)}}
    draw = lambda shape: jnp.asarray(random.normal(size=shape), jnp.float32)  # noqa: E731
    return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))


def quadratic(params, goal):
    return sum(jnp.sum((a - b) ** 2) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(goal), strict=True)) / 2


def train(config, params, goal, steps, **options):
    optimizer = make_optimizer(config, steps, jax.eval_shape(lambda: params), **options)

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(jax.grad(quadratic)(params, goal), state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params


def one_update(config, params, gradients):
    optimizer = make_optimizer(config, 10, params)
    return optimizer.update(gradients, optimizer.init(params), params)[0]
