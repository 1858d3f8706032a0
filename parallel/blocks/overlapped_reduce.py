"""A stack of blocks that sums each block's gradients over the mesh inside backward, beside the next block's products.

    backward   for each block n, last to first:
                   dW(n+1) = all-reduce                    beside the products of block n
                   dx, dW(n) = gradient of block n         with its reduce-scatter over fsdp
               dW(0) = all-reduce                          exposed

One all-reduce after backward overlaps with nothing. An all-reduce in the turn that computes its gradient has only the
rest of that turn. Here the loop carries the gradients of the previous block, so that their all-reduce can take a whole
turn. The first turn reduces zeros, which is hidden too: N + 1 all-reduces of one block instead of one of all N. The
cost is the gradients of one more block in memory.

Every remat policy works: forward keeps what the backward function of a block holds, except the block's parameters.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section 3.2.3
(overlap with backward; a bucket is a block here).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...mesh.keys import key_of
from ..collectives import vary, varying_zeros
from ..data import reduce_gradients
from ..model import Activations, Params, fold_block
from ..plan import ShardingPlan
from ..xla.ordered_collectives import order_after
from .differentiable import join_differentiable, split_differentiable
from .gathered_block import block_layouts

Block = Callable[[Activations, Params, Params | None, Array | None], Activations]


class Pull(NamedTuple):
    """The static part of the backward function of a block, found while forward is traced.

    Attributes:
        treedef: The structure of the function, a pytree of residuals.
        inputs: For each residual, its number among the block's parameters, or None.
    """

    treedef: Any
    inputs: list[int | None]


def run_overlapped(
    block: Block, plan: ShardingPlan, layers: tuple[Params, Params], x: Activations, key: Array | None
) -> Activations:
    """Runs a stack of blocks whose backward returns gradients that are summed over all axes. Inside `shard_map`.

    Args:
        block: One block, see `gathered_block`; it may recompute in backward.
        plan: The plan, with the options of the step.
        layers: The trained and the kept per-device parameters of all blocks, stacked on dim 0. Their types do not vary
            over the axes that their gradients are summed over.
        x: The activations that enter the first block.
        key: The key of the step, or None.

    Returns:
        The activations that leave the last block, differentiable in the trained parameters and in the floating-point
        leaves of `x`.
    """
    stack = _Stack(block, plan, x)
    key_data = None if key is None else jax.random.key_data(key)

    @jax.custom_vjp
    def run(
        shards: Params, kept: Params, differentiable: list[Array], others: list[Array], key_data: Array | None
    ) -> Activations:
        return stack.forward(shards, kept, differentiable, others, key_data)[0]

    run.defvjp(stack.forward, stack.backward)
    return run(*layers, *split_differentiable(x), key_data)


class _Stack:
    """Forward and backward of all blocks; `x` is an example of activations."""

    def __init__(self, block: Block, plan: ShardingPlan, x: Activations) -> None:
        self.block, self.plan, self.x = block, plan, x
        self.pull: Pull | None = None

    def forward(
        self, shards: Params, kept: Params, differentiable: list[Array], others: list[Array], key_data: Array | None
    ) -> Any:
        """Runs all blocks forward; returns the activations, and what backward needs."""
        key = None if key_data is None else key_of(key_data)

        def turn(x: Activations, layer: tuple[Params, Params, Array]) -> tuple[Activations, list[Array]]:
            (own, own_kept), index = self.vary(layer[:2]), layer[2]
            differentiable, others = split_differentiable(x)

            def one(own: Params, differentiable: list[Array]) -> tuple[list[Array], list[Array]]:
                y = self.block(join_differentiable(x, differentiable, others), own, own_kept, fold_block(key, index))
                return split_differentiable(y)

            y, pull, y_others = jax.vjp(one, own, differentiable, has_aux=True)
            residuals, treedef = jax.tree.flatten(pull)
            numbers = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves((own, own_kept)))}
            self.pull = Pull(treedef, [numbers.get(id(leaf)) for leaf in residuals])
            left = [leaf for leaf, number in zip(residuals, self.pull.inputs, strict=True) if number is None]
            return join_differentiable(x, y, y_others), left

        entering = join_differentiable(self.x, differentiable, others)
        leaving, residuals = lax.scan(turn, entering, (shards, kept, jnp.arange(_count(shards))))
        return leaving, (shards, kept, residuals)

    def backward(self, saved: Any, gradient: Activations) -> Any:
        """Runs all blocks backward; returns the gradients of the parameters and of the differentiable leaves."""
        shards, kept, residuals = saved
        count, recomputes = _count(shards), self.plan.options.remat != "none"
        later = self.vary(jax.tree.map(lambda leaf: varying_zeros(leaf.shape[1:], leaf.dtype, leaf), shards))
        summed = jax.tree.map(lambda leaf: varying_zeros(leaf.shape, leaf.dtype, leaf), shards)

        def turn(carry: Any, layer: Any) -> tuple[Any, None]:
            dx, later, summed = carry
            (own, own_kept), left, index = self.vary(layer[:2]), *layer[2:]
            reduced = self.reduce(later)
            dx, left = order_after(reduced, (dx, left))
            if recomputes:
                dx, _ = lax.optimization_barrier((dx, reduced))
            summed = _set_block(summed, (index + 1) % count, reduced)
            gradients, dx = self.pull_of(own, own_kept, left)(dx)
            return (dx, gradients, summed), None

        dy = [leaf for leaf in jax.tree.leaves(gradient) if leaf.dtype != jax.dtypes.float0]
        layers = (shards, kept, residuals, jnp.arange(count))
        (dx, first, summed), _ = lax.scan(turn, (dy, later, summed), layers, reverse=True)
        return _set_block(summed, 0, self.reduce(order_after(dx, first))), None, dx, None, None

    def vary(self, params: Any) -> Any:
        """Types parameters of one block as varying over all axes, so that their gradients stay local."""
        return jax.tree.map(lambda leaf: vary(leaf, self.plan.summed_axes), params)

    def reduce(self, gradients: Params) -> Params:
        """Sums the gradients of one block over the axes over which they are partial sums."""
        _, layouts = block_layouts(self.plan.trained)
        axes, dtype = self.plan.summed_axes, self.plan.options.precision.reduce
        return reduce_gradients(gradients, (), layouts, axes, dtype)[0]

    def pull_of(self, own: Params, own_kept: Params, left: list[Array]) -> Callable[[list[Array]], Any]:
        """Returns the backward function of one block."""
        assert self.pull is not None
        inputs, others = jax.tree.leaves((own, own_kept)), iter(left)
        residuals = [next(others) if number is None else inputs[number] for number in self.pull.inputs]
        return jax.tree.unflatten(self.pull.treedef, residuals)


def _set_block(stacked: Params, index: Array | int, one: Params) -> Params:
    return jax.tree.map(lambda all_, own: lax.dynamic_update_index_in_dim(all_, own, index, 0), stacked, one)


def _count(shards: Params) -> int:
    return len(jax.tree.leaves(shards)[0])
