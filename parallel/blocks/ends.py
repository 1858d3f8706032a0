"""The stack of blocks on GPUs: the first and the last block run outside the loop, beside collectives of both ends.

    forward    for each block n but the last:
                   W(n+1) = gather                   beside the products of block n
                   x = block(W(n), x)
               the last block                        beside the gather of the head
    backward   the last block, with the W of forward beside the reduce-scatter of the head's gradient
               for each block n but the first:       beside the reduce-scatter of dW(n+1)
                   dx, dW(n) = gradient of block n
               dx of the first block                 beside the reduce-scatter of dW(1)
               dW of the first block                 beside the reduce-scatter of the embedding's gradient
               reduce-scatter of dW(0)               exposed

In a plain loop over all blocks, these collectives run alone, and each turn waits for its first gathers. The collectives
are the same, but the last block is gathered once instead of twice: only the head runs between its forward and its
backward. Backward gathers a block in the turn that needs it, beside the reduce-scatters of the block after it. If
backward sums gradients over `data`, each sum follows its reduce-scatter. XLA for GPUs orders operations by their
operands and by barriers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...mesh.compat import varying_axes
from ..model import Activations, BlockModel, Params, join_differentiable, split_differentiable
from ..plan import ShardingPlan
from ..xla.platform import overlaps
from .prefetch import MIN_BLOCKS, Shards, Stack, hold, prefetches_blocks, run_stack


def separates_ends(model: BlockModel, plan: ShardingPlan) -> bool:
    """Returns whether the first and the last block run outside the loop over blocks."""
    if not overlaps(plan.platform) or plan.pipeline or prefetches_blocks(plan):
        return False
    is_tied = not set(model.embed_reads).isdisjoint(model.head_reads)
    gathers = plan.gathers_blocks and not plan.keeps_blocks and plan.options.remat == "full"
    return gathers and model.num_blocks >= MIN_BLOCKS and not is_tied


def run_with_ends(
    stack_of: Callable[[Activations], "Ends"],
    embed: Callable[[Params], Activations],
    shards: Shards,
    embedding: Params,
    head: Params,
    key_data: Array | None,
) -> tuple[Activations, Params]:
    """Runs the embedding and all blocks. Inside `shard_map`.

    Args:
        stack_of: Returns the stack for the activations of the embedding.
        embed: The embedding as a function of the shards of the groups of parameters that it reads.
        shards: The per-device parameters of all blocks, stacked on dim 0.
        embedding: The shards that `embed` reads.
        head: The shards that the head reads.
        key_data: The key of the step as raw data, or None.

    Returns:
        The activations that leave the last block, and `head`, whose gradients are reduced beside the last block.
    """

    def embedded(shards: Params) -> tuple[list[Array], Activations]:
        x = embed(shards)
        return split_differentiable(x)[0], x

    _, pull, x = jax.vjp(embedded, lax.stop_gradient(embedding), has_aux=True)
    stack, arguments = stack_of(x), (shards, embedding, head, pull, *split_differentiable(x), key_data)
    return run_stack(stack.all_forward, stack.all_backward, *arguments)


class Ends(Stack):
    """Forward and backward of all blocks, and backward of the embedding."""

    def all_forward(
        self, shards: Shards, embedding: Params, head: Params, pull: Any, differentiable: list[Array], *rest: Any
    ) -> Any:
        """Runs all blocks forward; returns the activations with `head`, and the residuals for `all_backward`."""
        (others, key_data), final = rest, self.num_blocks - 1

        def turn(carry: Any, index: Array) -> tuple[Any, Any]:
            x, params = carry
            y, own = self.run(params, x, self.key_of(key_data, index))
            return (y, self.gather(shards, index + 1, done=split_differentiable(y)[0])), own

        if self.plan.options.accumulate > 1:  # otherwise XLA gathers the last block before the loop over microbatches
            shards, differentiable = lax.optimization_barrier((shards, differentiable))
        entering = join_differentiable(self.x, differentiable, others), self.gather(shards, 0)
        (x, params), inputs = lax.scan(turn, entering, jnp.arange(final))
        y, last = self.run(params, x, self.key_of(key_data, final))
        return (y, head), (shards, pull, inputs, last, params, key_data)

    def all_backward(self, saved: Any, gradient: tuple[Activations, Params]) -> Any:
        """Runs all blocks and the embedding backward; returns the gradients of the arguments of `all_forward`."""
        (shards, pull, inputs, last, params, key_data), final = saved, self.num_blocks - 1

        def differentiate(shards: Shards, index: Array | int, dx: list[Array]) -> tuple[list[Array], Params]:
            x = jax.tree.map(lambda leaf: leaf[index], inputs)
            return self.differentiate(self.gather(shards, index, done=dx), x, self.key_of(key_data, index), dx)

        def place(gradients: Params, own: Params, index: Array | int, done: Any) -> Params:
            update = lax.dynamic_update_index_in_dim
            return jax.tree.map(lambda all, one: update(all, one, index, 0), gradients, self.scatter(own, done))

        def turn(carry: Any, index: Array) -> tuple[Any, None]:
            dx, later, gradients = carry
            gradients = place(gradients, later, index + 1, done=dx)
            return (*differentiate(shards, index, dx), gradients), None

        dy = [leaf for leaf in jax.tree.leaves(gradient[0]) if leaf.dtype != jax.dtypes.float0]
        differentiable, others = split_differentiable(last)
        last = join_differentiable(last, _after(dy, differentiable), others)  # otherwise XLA keeps values of forward
        dx, own = self.differentiate(params, last, self.key_of(key_data, final), dy)
        carry = _after(gradient[1], dx), own, jax.tree.map(jnp.zeros_like, shards[0])
        (dx, own, gradients), _ = lax.scan(turn, carry, jnp.arange(1, final), reverse=True)
        gradients = place(gradients, own, 1, done=dx)
        dx, own = differentiate(_after(dx, shards), 0, dx)  # otherwise XLA keeps the first block whole since forward
        (embedding,) = pull(_after(gradients, dx))
        gradients = place(gradients, _after(embedding, own), 0, done=dx)
        return (gradients, None), embedding, gradient[1], None, None, None, None


def _after(done: Any, value: Any) -> Any:
    """Returns a value unchanged, which is available only after others.

    A barrier gives all its operands the same mesh axes that they vary over, so others with more axes are left out.
    """
    for axes in dict.fromkeys(map(varying_axes, jax.tree.leaves(value))):
        before = [each for each in jax.tree.leaves(done) if varying_axes(each) <= axes]
        _, value = hold(before, value, axes)
    return value
