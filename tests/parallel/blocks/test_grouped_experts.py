"""Rows grouped by expert: each block meets its own expert, empty blocks cost nothing, gradients are autodiff's."""

import jax
import jax.numpy as jnp
import numpy as np
from spmdkit.parallel.blocks.grouped_experts import apply_experts

EXPERTS, BLOCKS, ROWS, WIDTH = 3, 5, 2, 4
EXPERT_B = np.array([1, 0, 1, EXPERTS, 2], np.int32)
"""The expert of each block; the fourth is empty."""


def expert(weights, x):
    return jnp.tanh(x @ weights["up"]) * weights["scale"]


def example(dtype=np.float64):
    random = np.random.default_rng(0)
    x = random.normal(size=(BLOCKS, ROWS, WIDTH)).astype(dtype)
    x[EXPERT_B == EXPERTS] = 0
    up = random.normal(size=(EXPERTS, WIDTH, WIDTH)).astype(dtype)
    return {"up": up, "scale": np.array([1, 2, 3], dtype)}, x.reshape(-1, WIDTH)


def plain(weights, x):
    """Every block by itself."""
    blocks = x.reshape(BLOCKS, ROWS, WIDTH)
    made = [
        expert(jax.tree.map(lambda leaf, n=n: leaf[n], weights), block) if n < EXPERTS else jnp.zeros_like(block)
        for n, block in zip(EXPERT_B, blocks, strict=True)
    ]
    return jnp.concatenate(made)


def differentiated(function):
    def run(weights, x):
        y, pull = jax.vjp(function, weights, x)
        return y, pull(jnp.cos(y))

    return jax.jit(run)(*example())


def test_outputs_and_gradients_are_those_of_each_block_by_itself(float64):
    found = differentiated(lambda weights, x: apply_experts(expert, weights, x, jnp.asarray(EXPERT_B), 4))
    assert jax.tree.all(
        jax.tree.map(lambda one, other: np.allclose(one, other, atol=1e-14), found, differentiated(plain))
    )


def test_empty_blocks_are_not_computed():
    """What would be not a number in them is not seen."""
    weights, x = example(np.float32)
    x = x.reshape(BLOCKS, ROWS, WIDTH)
    x[EXPERT_B == EXPERTS] = np.nan
    y = jax.jit(lambda x: apply_experts(expert, weights, x, EXPERT_B, 4))(x.reshape(-1, WIDTH)).reshape(x.shape)
    assert np.isfinite(y).all()
    assert not y[EXPERT_B == EXPERTS].any()


def test_gradients_in_bfloat16_are_summed_in_float32():
    """Each of many blocks adds little to what is there."""
    weights = {"up": jnp.ones((1, 1, 1), "bfloat16")}
    x = jnp.ones((1024, 1), "bfloat16")

    def loss(weights):
        return (
            apply_experts(lambda w, x: x @ w["up"], weights, x, jnp.zeros(1024, jnp.int32), 1024)
            .astype("float32")
            .sum()
        )

    gradient = jax.jit(jax.grad(loss))(weights)["up"]
    assert gradient.dtype == jnp.bfloat16
    assert float(gradient[0, 0, 0]) == 1024
