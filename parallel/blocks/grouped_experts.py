"""Applies experts to rows that are grouped by expert, block by block: each row is computed only for its own expert.

Letters: M rows of a buffer, m rows in one of its blocks, e experts on the device; b counts the M / m blocks.

A buffer must fit the worst case and is mostly empty. Applying every expert to the whole buffer would cost e times too
much. Instead, the rows of an expert are contiguous, each group starts a new block of m rows, and for each expert a loop
runs over its blocks. Only the number of its turns depends on the data; all shapes are static. The only excess
computation is the padding of the last block of each group. XLA copies the weights of an expert out of those of all
experts, once before its loop.

Backward runs the same loops and recomputes each block, so the values between the products of an expert, (M, F) numbers
each, are never stored. The gradients of only one expert at a time are in float32.

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

    def run(weight: Weights, block: Array, _: None, y_bmD: Array) -> tuple[None, Array]:
        return None, y_bmD.at[block].set(expert(weight, blocks_bmD[block]))

    start = varying_zeros(blocks_bmD.shape, x_MD.dtype, (weights, x_MD, expert_b))
    return _each_block(weights, expert_b, expected, run, lambda: None, start)[0].reshape(x_MD.shape)


def _backward(expert: Expert, expected: int, residuals: tuple[Any, ...], dy_MD: Array) -> tuple[Weights, Array, None]:
    """Computes gradients; sums over blocks are in float32 or wider."""
    weights, x_MD, expert_b = residuals
    x_bmD, dy_bmD = _in_blocks(x_MD, expert_b), _in_blocks(dy_MD, expert_b)

    def run(weight: Weights, block: Array, sums: Weights, dx_bmD: Array) -> tuple[Weights, Array]:
        dweight, dx_mD = jax.vjp(expert, weight, x_bmD[block])[1](dy_bmD[block])
        sums = jax.tree.map(lambda total, part: total + part.astype(total.dtype), sums, dweight)
        return sums, dx_bmD.at[block].set(dx_mD)

    def zeros(leaf: Array, dtype: Any) -> Array:
        return varying_zeros(leaf.shape[1:], jnp.promote_types(leaf.dtype, dtype), (weights, x_MD, expert_b, dy_MD))

    start = partial(jax.tree.map, partial(zeros, dtype=jnp.float32), weights)
    dx_bmD, dweights = _each_block(weights, expert_b, expected, run, start, zeros(x_bmD[None], x_MD.dtype))
    return dweights, dx_bmD.reshape(x_MD.shape), None


apply_experts.defvjp(lambda expert, *inputs: (apply_experts(expert, *inputs), inputs[:-1]), _backward)


def _in_blocks(x_MD: Array, expert_b: Array) -> Array:
    return x_MD.reshape(expert_b.shape[0], -1, x_MD.shape[1])


def _each_block(weights: Weights, expert_b: Array, expected: int, run: Callable, start: Callable, carry: Array) -> Any:
    """Runs `sums, carry = run(weights of one expert, block, sums, carry)` for each block of each expert.

    Returns:
        The last carry, and the sums of each expert in the dtypes of its weights; they begin with `start()`.
    """
    order_b, num_experts = jnp.argsort(expert_b), jax.tree.leaves(weights)[0].shape[0]
    ends = jnp.searchsorted(expert_b[order_b], jnp.arange(num_experts + 1), method="compare_all")

    def of_expert(carry: Array, one: tuple[Weights, Array, Array]) -> tuple[Array, Any]:
        weight, begin, end = one
        with jax.named_scope(turns_scope("", [expected], num_experts)):
            sums, carry = lax.fori_loop(begin, end, lambda i, both: run(weight, order_b[i], *both), (start(), carry))
        return carry, sums if sums is None else jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), sums, weight)

    return lax.scan(of_expert, carry, (weights, ends[:-1], ends[1:]))
