"""FSDP with prefetching: forward and backward over a stack of blocks, each gathered while the previous one runs.

    forward    W0 = gather                                         exposed
               for each block n:   W(n+1) = gather                 beside the products of block n
                                   x, residuals(n) = block(W(n), x)
    backward   W(N-1) = gather                                     exposed
               for each block n, last to first:
                   W(n-1) = gather                                 beside the products of block n
                   dW(n+1) = reduce-scatter                        beside the products of block n
                   dx, dW(n) = gradient of block n
               dW(0) = reduce-scatter                              exposed

In a plain loop over blocks, a gather starts and ends in the turn that needs it, without a product in between, and the
compiler does not move it to another turn. Here the loop carries the whole parameters of the next block, so that a
gather can overlap the entire turn. The collectives are those of the plain loop: N gathers in forward, N in backward,
and N reduce-scatters of each sharded leaf. The cost is memory for one more gathered block and one more block of whole
gradients.

With remat `none`, backward keeps the residuals that `blocks/split_backward.py` finds, without values computed from
parameters alone. With remat `full`, it keeps the input of each block and runs the block again. Simulated devices do not
gain from prefetching: there, a gather waits for the block (`xla/ordered_collectives.py`).

Source: Zhao et al. 2023, "PyTorch FSDP", section 3.3.2 (prefetching).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...layouts.paths import join
from ...mesh.compat import own_source_lines, varying_axes
from ...mesh.errors import raise_problems
from ...mesh.keys import key_of
from ..data import make_varying, reduce_gradients, reduces_in_backward
from ..fsdp import AXIS, gather, scatter
from ..model import Activations, BlockModel, Params, fold_block, join_differentiable, split_differentiable
from ..plan import ShardingPlan
from ..xla.ordered_collectives import order_after
from .gathered_block import block_layouts
from .split_backward import SplitBlock, split_block

PREFETCH_REMAT = ("none", "full")
MIN_BLOCKS = 4
"""With fewer blocks, XLA unrolls the short loops and keeps whole parameters from forward to backward."""

Shards: TypeAlias = tuple[Params, Params]
"""Trained and frozen parameters, each with None in place of the other; shards, or one block's whole parameters."""


def prefetches_blocks(plan: ShardingPlan) -> bool:
    """Returns whether each block is gathered while the previous one runs."""
    return plan.gathers_blocks and not plan.keeps_blocks and bool(plan.in_force(AXIS, "prefetch", 0))


def check_prefetch(num_blocks: int, remat: str) -> None:
    """Checks the requirements of a prefetched stack.

    Raises:
        UserError: There are too few blocks, or the remat policy is not supported.
    """
    problems = []
    if num_blocks < MIN_BLOCKS:
        problems.append(
            f"strategy.fsdp.prefetch=1 needs {MIN_BLOCKS} blocks or more, and the model has {num_blocks}: a shorter "
            "loop cannot hide a gather. Set strategy.fsdp.prefetch to 0, or increase model.layers."
        )
    if remat not in PREFETCH_REMAT:
        problems.append(
            f"train.remat={remat} does not combine with strategy.fsdp.prefetch=1: blocks that are gathered in advance "
            "keep everything that backward needs, or only their input. Set train.remat to "
            f"{' or '.join(PREFETCH_REMAT)}, or prefetch to 0."
        )
    raise_problems(problems)


def run_prefetched(
    model: BlockModel, plan: ShardingPlan, shards: Shards, x: Activations, key: Array | None
) -> Activations:
    """Runs a stack of blocks, each gathered while the previous one runs. Inside `shard_map`.

    Args:
        model: The model, split over the axes inside it.
        plan: The plan, with the options of the step.
        shards: The per-device parameters of all blocks, stacked on dim 0.
        x: The activations that enter the first block.
        key: The key of the step, or None.

    Returns:
        The activations that leave the last block, differentiable in the trained shards and in the floating-point leaves
        of `x`.
    """
    key_data = None if key is None else jax.random.key_data(key)
    stack = make_stack(model, plan, shards, x, key_data)
    return run_stack(stack.forward, stack.backward, shards, *split_differentiable(x), key_data)


def run_stack(forward: Callable[..., Any], backward: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a stack forward; autodiff runs it backward."""
    run = jax.custom_vjp(lambda *arguments: forward(*arguments)[0])
    run.defvjp(forward, own_source_lines()(backward))
    return run(*arguments)


def make_stack(
    model: BlockModel, plan: ShardingPlan, shards: Shards, x: Activations, key_data: Array | None
) -> "Stack":
    """Returns the stack that `run_prefetched` runs; the arguments are the same, with the key as raw data."""
    stack = Stack(model, plan, x, len(jax.tree.leaves(shards)[0]))
    if plan.options.remat != "full":
        trained, frozen = stack.gather(shards, 0)
        stack.parts = split_block(stack.run_block, trained, x, (frozen, stack.key_of(key_data, 0)))
    return stack


@dataclass
class Stack:
    """Forward and backward of all blocks; `x` is an example of activations. Without `parts`, blocks are recomputed."""

    model: BlockModel
    plan: ShardingPlan
    x: Activations
    num_blocks: int
    parts: SplitBlock | None = None

    def gather(self, shards: Shards, index: Array | int, done: Any = ()) -> Shards:
        """Gathers the parameters of one block; on simulated devices only after `done`."""
        one, (stored, _) = jax.tree.map(lambda leaf: leaf[index], join(*shards)), block_layouts(self.plan)
        one = order_after(done, make_varying(one, stored, self.plan.summed_axes))
        return self.gather_one(one, like=shards)

    def gather_one(self, one: Params, like: Shards) -> Shards:
        """Gathers the shards of one block, and separates trained and frozen parameters as in `like`."""
        stored, _ = block_layouts(self.plan)
        whole = gather(one, stored, self.plan.gather_axes, self.plan.options.precision)

        def part(tree: Params) -> Params:
            return jax.tree.map(lambda leaf, there: None if there is None else leaf, whole, tree)

        return part(like[0]), part(like[1])

    def scatter(self, gradients: Params, done: Any) -> Params:
        """Reduces the gradients of one block as backward does; on simulated devices only after `done`."""
        (_, reduced), precision = block_layouts(self.plan), self.plan.options.precision
        found = scatter(order_after(done, gradients), reduced, self.plan.gather_axes, precision)
        if not reduces_in_backward(self.plan):
            return found
        trained = block_layouts(self.plan.trained)[1]
        return reduce_gradients(found, (), trained, self.plan.summed_axes, precision.reduce)[0]

    def key_of(self, key_data: Array | None, index: Array | int) -> Array | None:
        """Returns the key of one block."""
        return fold_block(None if key_data is None else key_of(key_data), jnp.asarray(index))

    def run_block(self, trained: Params, x: Activations, rest: tuple[Params, Array | None]) -> Activations:
        """Runs one block, as `split_block` calls it; `rest` has no gradient."""
        frozen, key = rest
        return self.model.block(join(trained, frozen), x, key)

    def run(self, params: Shards, x: Activations, key: Array | None) -> tuple[Activations, Any]:
        """Runs one block forward; also returns its residuals."""
        trained, frozen = params
        rest = (frozen, key)
        return self.parts.forward(trained, x, rest) if self.parts else (self.run_block(trained, x, rest), x)

    def differentiate(
        self, params: Shards, residuals: Any, key: Array | None, dy: list[Array]
    ) -> tuple[list[Array], Params]:
        """Runs one block backward; returns the gradients of its input and of its trained whole parameters."""
        trained, frozen = params
        rest = (frozen, key)
        if self.parts:
            dx, deferred = self.parts.backward_input(trained, rest, residuals, dy)
            return dx, self.parts.backward_weight(trained, rest, residuals, deferred)
        differentiable, others = split_differentiable(residuals)

        def recompute(trained: Params, differentiable: list[Array]) -> list[Array]:
            y = self.run_block(trained, join_differentiable(residuals, differentiable, others), rest)
            return split_differentiable(y)[0]

        gradients, dx = jax.vjp(recompute, trained, differentiable)[1](dy)
        return dx, gradients

    def forward(self, shards: Shards, differentiable: list[Array], others: list[Array], key_data: Array | None) -> Any:
        """Runs all blocks forward; returns the activations, and the residuals for `backward`."""
        final = self.num_blocks - 1

        def turn(carry: Any, index: Array) -> Any:
            x, params = carry
            x, residuals = self.run(params, x, self.key_of(key_data, index))
            return (x, self.gather(shards, index + 1, done=split_differentiable(x)[0])), residuals

        # Without this barrier, XLA moves the gathers out of a loop over microbatches.
        shards, differentiable = lax.optimization_barrier((shards, differentiable))
        entering = (join_differentiable(self.x, differentiable, others), self.gather(shards, 0))
        (leaving, params), residuals = lax.scan(turn, entering, jnp.arange(final))
        leaving, last = self.run(params, leaving, self.key_of(key_data, final))
        return leaving, (shards, residuals, last, key_data)

    def backward(self, saved: Any, gradient: Activations) -> Any:
        """Runs all blocks backward; returns the gradients of the shards and of the differentiable leaves."""
        shards, residuals, last, key_data = saved
        axes = frozenset().union(*map(varying_axes, jax.tree.leaves((shards, last))))
        shards, last = hold(shards, last, axes) if self.parts else lax.optimization_barrier((shards, last))
        final = self.num_blocks - 1

        def turn(carry: Any, residuals: Any, index: Array | int) -> Any:
            dx, params, later = carry
            dx, own = self.differentiate(params, residuals, self.key_of(key_data, index), dx)
            earlier = self.gather(shards, index - 1, done=dx) if not isinstance(index, int) else None
            return (dx, earlier, own), self.scatter(later, done=dx)

        dy = [leaf for leaf in jax.tree.leaves(gradient) if leaf.dtype != jax.dtypes.float0]
        params = self.gather(shards, final, done=dy)
        dy, last = order_after(params, dy), last if self.parts else order_after(params, last)
        dx, own = self.differentiate(params, last, self.key_of(key_data, final), dy)
        carry, middle = lax.scan(
            lambda carry, layer: turn(carry, *layer),
            (dx, self.gather(shards, final - 1, done=dx), own),
            (jax.tree.map(lambda leaf: leaf[1:], residuals), jnp.arange(1, final)),
            reverse=True,
        )
        (dx, _, own), second = turn(carry, jax.tree.map(lambda leaf: leaf[0], residuals), 0)
        gradients = [_stacked(self.scatter(own, done=dx)), _stacked(second), middle]
        return (jax.tree.map(lambda *parts: jnp.concatenate(parts), *gradients), None), dx, None, None


def hold(before: Any, value: Any, axes: frozenset[str]) -> tuple[Any, Any]:
    """Puts a barrier around both, except for leaves of `value` that vary over other mesh axes, such as positions.

    A barrier gives all its operands the same type, and the parts of a block need residuals of their original types.
    """
    leaves, treedef = jax.tree.flatten(value)
    before, held = lax.optimization_barrier((before, [leaf for leaf in leaves if varying_axes(leaf) == axes]))
    held = iter(held)
    return before, treedef.unflatten([next(held) if varying_axes(leaf) == axes else leaf for leaf in leaves])


def _stacked(tree: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf[None], tree)
