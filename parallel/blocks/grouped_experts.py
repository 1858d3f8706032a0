"""Applies experts to rows that are grouped by expert, block by block: each row is computed only for its own expert.

Letters: M rows of a buffer, m rows in one of its blocks, e experts on the device; b counts the M / m blocks.

A buffer must fit the worst case and is mostly empty. Applying every expert to the whole buffer would cost e times too
much. Instead, the rows of an expert are contiguous, each group starts a new block of m rows, and a loop runs over the
blocks that are not empty. Only the number of its turns depends on the data; all shapes are static. The only excess
computation is the padding of the last block of each group.

Backward runs the same loop and recomputes each block, so the values between the products of an expert, (M, F) numbers
each, are never stored.

Source: Gale et al. 2022, "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts", section 4 (rows grouped by
expert and padded to blocks, instead of a capacity).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..collectives import varying_zeros
from ..xla.optional_turns import turns_scope

Weights: TypeAlias = Any
"""A pytree of arrays with the experts on dim 0."""
Expert: TypeAlias = Callable[[Weights, Array], Array]
"""`expert(weights of one, rows (m, D)) -> (m, D)`; a row of zeros must give zeros."""


@partial(jax.custom_vjp, nondiff_argnums=(0, 4))
def apply_experts(expert: Expert, weights: Weights, x_MD: Array, expert_b: Array, expected: int) -> Array:
    """Applies to each block of rows its own expert.

    Args:
        expert: The function of one expert.
        weights: Arrays (e, ...), per-device.
        x_MD: (M, D), per-device; rows of a block beyond its group are zeros.
        expert_b: int32, (M / m,), the expert of each block; e for an empty block.
        expected: The expected number of blocks that are not empty, for predictions of the time (`census.calls_of`).

    Returns:
        (M, D), zeros in empty blocks.
    """
    blocks_bmD = _in_blocks(x_MD, expert_b)
    order_b, num_full = _full_blocks(weights, expert_b)

    def turn(i: Array, y_bmD: Array) -> Array:
        block = order_b[i]
        return y_bmD.at[block].set(expert(_one(weights, expert_b[block]), blocks_bmD[block]))

    start = varying_zeros(blocks_bmD.shape, x_MD.dtype, (weights, x_MD, expert_b))
    with jax.named_scope(turns_scope("", [expected])):
        return lax.fori_loop(0, num_full, turn, start).reshape(x_MD.shape)


def _backward(expert: Expert, expected: int, residuals: tuple[Any, ...], dy_MD: Array) -> tuple[Weights, Array, None]:
    """Computes gradients; sums over blocks are in float32 or wider."""
    weights, x_MD, expert_b = residuals
    x_bmD, dy_bmD = _in_blocks(x_MD, expert_b), _in_blocks(dy_MD, expert_b)
    order_b, num_full = _full_blocks(weights, expert_b)

    def turn(i: Array, sums: tuple[Weights, Array]) -> tuple[Weights, Array]:
        dweights, dx_bmD = sums
        block = order_b[i]
        index = expert_b[block]
        dweight, dx_mD = jax.vjp(expert, _one(weights, index), x_bmD[block])[1](dy_bmD[block])
        dweights = jax.tree.map(lambda total, part: total.at[index].add(part.astype(total.dtype)), dweights, dweight)
        return dweights, dx_bmD.at[block].set(dx_mD)

    def start(leaf: Array, dtype: Any) -> Array:
        return varying_zeros(leaf.shape, dtype, (weights, x_MD, expert_b, dy_MD))

    sums = jax.tree.map(lambda leaf: start(leaf, jnp.promote_types(leaf.dtype, jnp.float32)), weights)
    with jax.named_scope(turns_scope("", [expected])):
        dweights, dx_bmD = lax.fori_loop(0, num_full, turn, (sums, start(x_bmD, x_MD.dtype)))
    dweights = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), dweights, weights)
    return dweights, dx_bmD.reshape(x_MD.shape), None


apply_experts.defvjp(lambda expert, *inputs: (apply_experts(expert, *inputs), inputs[:-1]), _backward)


def _in_blocks(x_MD: Array, expert_b: Array) -> Array:
    return x_MD.reshape(expert_b.shape[0], -1, x_MD.shape[1])


def _full_blocks(weights: Weights, expert_b: Array) -> tuple[Array, Array]:
    """Returns the blocks ordered by expert, with empty ones last, and the number of nonempty blocks."""
    return jnp.argsort(expert_b), jnp.sum(expert_b < jax.tree.leaves(weights)[0].shape[0], dtype=jnp.int32)


def _one(weights: Weights, index: Array) -> Weights:
    return jax.tree.map(lambda leaf: leaf[index], weights)
