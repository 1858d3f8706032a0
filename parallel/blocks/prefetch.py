"""FSDP's blocks with the next one's gather under way: forward and backward over the stack, written out.

    forward    W0 = gather                                         exposed
               for each block n:   W(n+1) = gather                 beside the products of block n
                                   x, residuals(n) = block(W(n), x)
    backward   W(N-1) = gather                                     exposed
               for each block n, last to first:
                   W(n-1) = gather                                 beside the products of block n
                   dW(n+1) = reduce-scatter                        beside the products of block n
                   dx, dW(n) = gradient of block n
               dW(0) = reduce-scatter                              exposed

In a plain loop over blocks a gather starts and ends in the turn that needs it, with no product between: the compiler
does not move it across the boundary of a loop. Here the loop carries the next block's whole parameters, so that each
turn's gather has all of the turn to finish. The collectives are those of the plain form: N gathers forward, N backward,
N reduce-scatters of each sharded leaf. Cost: one more gathered block and one more block of whole gradients alive.

What backward keeps is what `blocks/split_backward.py` finds that it needs, without anything made of parameters alone
(remat `none`), or the input of each block, which is then run once more (remat `full`). On simulated devices, which gain
nothing by it, a gather waits for the block beside it (`xla/in_order.py`).

Source: Zhao et al. 2023, "PyTorch FSDP", section 3.3.2 (prefetching).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...layouts.paths import join
from ...mesh.compat import varying_axes
from ...mesh.errors import UserError
from ...mesh.keys import key_of
from ..fsdp import AXIS, gather, scatter
from ..model import Activations, Params, fold_block
from ..plan import ShardingPlan
from ..precision import Precision
from ..xla.in_order import after
from .differentiable import join_differentiable, split_differentiable
from .split_backward import SplitBlock, split_block

PREFETCH_REMAT = ("none", "full")
FEWEST_BLOCKS = 4
"""With fewer, the loops are so short that XLA unrolls them and keeps whole parameters from forward to backward."""

Block = Callable[[Params, Activations, Array | None], Activations]
Shards: TypeAlias = tuple[Params, Params]
"""Parameters that train, and the others, each with None in place of the other's; shards, or whole ones of one block."""


def prefetches_blocks(plan: ShardingPlan) -> bool:
    """Whether each block is gathered while the one before it runs."""
    return plan.gathers_blocks and not plan.keeps_blocks and bool(plan.in_force(AXIS, "prefetch", 0))


def check_prefetch(num_blocks: int, remat: str) -> None:
    """Checks what a prefetched stack needs.

    Raises:
        UserError: There are too few blocks, or the remat policy is another.
    """
    problems = []
    if num_blocks < FEWEST_BLOCKS:
        problems.append(
            f"strategy.fsdp.prefetch=1 needs {FEWEST_BLOCKS} blocks or more, and the model has {num_blocks}: in loops "
            "this short there is nothing to hide behind. Set strategy.fsdp.prefetch to 0, or model.layers higher."
        )
    if remat not in PREFETCH_REMAT:
        problems.append(
            f"train.remat={remat} does not go with strategy.fsdp.prefetch=1: blocks that are gathered ahead keep all "
            f"that backward needs, or their input. Set train.remat to {' or '.join(PREFETCH_REMAT)}, or prefetch to 0."
        )
    if problems:
        raise UserError("\n".join(problems))


def run_prefetched(
    block: Block,
    shards: Params,
    fixed: Params,
    x: Activations,
    key: Array | None,
    *,
    stored: Any,
    reduced: Any,
    axes: tuple[str, ...],
    precision: Precision,
    remat: str,
) -> Activations:
    """Runs a stack of blocks, each gathered while the one before it runs. Inside `shard_map`.

    Args:
        block: The function of one block, on whole parameters.
        shards: Per-device parameters of all blocks, stacked on dim 0; None in place of those that do not train.
        fixed: Those that do not train; None in place of the others.
        x: Activations that enter the first block.
        key: The key of the step, or None.
        stored: Layouts of one block's parameters.
        reduced: Layouts of its gradients.
        axes: The mesh axes to gather over.
        precision: The compute and reduce dtypes.
        remat: `none` keeps what backward needs, `full` the input of each block.

    Returns:
        Activations that leave the last block; differentiable in `shards` and the leaves of `x` that have a gradient.
    """
    key_data = None if key is None else jax.random.key_data(key)
    stack = make_stack(
        block, (shards, fixed), x, key_data, stored=stored, reduced=reduced, axes=axes, precision=precision, remat=remat
    )

    @jax.custom_vjp
    def run(
        shards: Params, fixed: Params, differentiable: list[Array], others: list[Array], key_data: Array | None
    ) -> Activations:
        return stack.forward(shards, fixed, differentiable, others, key_data)[0]

    run.defvjp(stack.forward, stack.backward)
    return run(shards, fixed, *split_differentiable(x), key_data)


def make_stack(
    block: Block, shards: Shards, x: Activations, key_data: Array | None, *, remat: str, **options: Any
) -> "Stack":
    """The stack that `run_prefetched` runs; arguments as there, the key as raw data."""
    stack = Stack(block, x, len(jax.tree.leaves(shards)[0]), **options)
    if remat != "full":
        trained, fixed = stack.whole(shards, 0)
        stack.parts = split_block(stack.run_block, trained, x, (fixed, stack.key_of(key_data, 0)))
    return stack


@dataclass
class Stack:
    """Forward and backward of all blocks; `x` is an example of activations, without `parts` blocks are recomputed."""

    block: Block
    x: Activations
    num_blocks: int
    stored: Any
    reduced: Any
    axes: tuple[str, ...]
    precision: Precision
    parts: SplitBlock | None = None

    def whole(self, shards: Shards, index: Array | int, done: Any = ()) -> Shards:
        """The gathered parameters of one block, on simulated devices not before `done` is there."""
        trained, fixed = shards
        one = after(done, jax.tree.map(lambda leaf: leaf[index], join(trained, fixed)))
        return self.split(gather(one, self.stored, self.axes, self.precision), like=shards)

    @staticmethod
    def split(params: Params, like: Shards) -> Shards:
        """Parameters of one block in two, as `like` is."""

        def part(tree: Params) -> Params:
            return jax.tree.map(lambda leaf, there: None if there is None else leaf, params, tree)

        return part(like[0]), part(like[1])

    def shard(self, gradients: Params, done: Any) -> Params:
        """The reduce-scattered gradients of one block, likewise."""
        return scatter(after(done, gradients), self.reduced, self.axes, self.precision)

    def key_of(self, key_data: Array | None, index: Array | int) -> Array | None:
        """The key of one block."""
        return fold_block(None if key_data is None else key_of(key_data), jnp.asarray(index))

    def run_block(self, trained: Params, x: Activations, rest: tuple[Params, Array | None]) -> Activations:
        """One block, as `split_block` takes it: `rest` has no gradient."""
        fixed, key = rest
        return self.block(join(trained, fixed), x, key)

    def run(self, params: Shards, x: Activations, key: Array | None) -> tuple[Activations, Any]:
        """One block forward, and what backward keeps of it."""
        trained, fixed = params
        rest = (fixed, key)
        return self.parts.forward(trained, x, rest) if self.parts else (self.run_block(trained, x, rest), x)

    def differentiate(
        self, params: Shards, residuals: Any, key: Array | None, dy: list[Array]
    ) -> tuple[list[Array], Params]:
        """One block backward: gradients of its input and of those of its whole parameters that train."""
        trained, fixed = params
        rest = (fixed, key)
        if self.parts:
            dx, deferred = self.parts.backward_input(trained, rest, residuals, dy)
            return dx, self.parts.backward_weight(trained, rest, residuals, deferred)
        differentiable, others = split_differentiable(residuals)

        def recompute(trained: Params, differentiable: list[Array]) -> list[Array]:
            y = self.run_block(trained, join_differentiable(residuals, differentiable, others), rest)
            return split_differentiable(y)[0]

        gradients, dx = jax.vjp(recompute, trained, differentiable)[1](dy)
        return dx, gradients

    def forward(
        self,
        trained: Params,
        fixed: Params,
        differentiable: list[Array],
        others: list[Array],
        key_data: Array | None,
    ) -> Any:
        """All blocks forward: the activations that leave, and what `backward` is given."""
        final = self.num_blocks - 1

        def turn(carry: Any, index: Array) -> Any:
            x, params = carry
            x, residuals = self.run(params, x, self.key_of(key_data, index))
            return (x, self.whole(shards, index + 1, done=split_differentiable(x)[0])), residuals

        # Else the gathers leave a loop over microbatches.
        shards, differentiable = lax.optimization_barrier(((trained, fixed), differentiable))
        entering = (join_differentiable(self.x, differentiable, others), self.whole(shards, 0))
        (leaving, params), residuals = lax.scan(turn, entering, jnp.arange(final))
        leaving, last = self.run(params, leaving, self.key_of(key_data, final))
        return leaving, (shards, residuals, last, key_data)

    def backward(self, saved: Any, gradient: Activations) -> Any:
        """All blocks backward: gradients of the shards and of the differentiable leaves."""
        shards, residuals, last, key_data = saved
        shards, last = _held_back(shards, last) if self.parts else lax.optimization_barrier((shards, last))
        final = self.num_blocks - 1

        def turn(carry: Any, residuals: Any, index: Array | int) -> Any:
            dx, params, later = carry
            dx, own = self.differentiate(params, residuals, self.key_of(key_data, index), dx)
            earlier = self.whole(shards, index - 1, done=dx) if not isinstance(index, int) else None
            return (dx, earlier, own), self.shard(later, done=dx)

        dy = [leaf for leaf in jax.tree.leaves(gradient) if leaf.dtype != jax.dtypes.float0]
        params = self.whole(shards, final, done=dy)
        dy, last = after(params, dy), last if self.parts else after(params, last)
        dx, own = self.differentiate(params, last, self.key_of(key_data, final), dy)
        carry, middle = lax.scan(
            lambda carry, layer: turn(carry, *layer),
            (dx, self.whole(shards, final - 1, done=dx), own),
            (jax.tree.map(lambda leaf: leaf[1:], residuals), jnp.arange(1, final)),
            reverse=True,
        )
        (dx, _, own), second = turn(carry, jax.tree.map(lambda leaf: leaf[0], residuals), 0)
        gradients = [_stacked(self.shard(own, done=dx)), _stacked(second), middle]
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *gradients), None, dx, None, None


def _held_back(shards: Shards, residuals: Any) -> tuple[Shards, Any]:
    """A barrier before backward, but for residuals that vary over fewer mesh axes than the rest, such as positions.

    A barrier types all that passes it alike, and the parts of a block take residuals of the types they were split for.
    """
    leaves, treedef = jax.tree.flatten(residuals)
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves((shards, residuals))))
    alike = [varying_axes(leaf) == axes for leaf in leaves]
    shards, held = lax.optimization_barrier((shards, [leaf for leaf, each in zip(leaves, alike, strict=True) if each]))
    held = iter(held)
    return shards, treedef.unflatten([next(held) if each else leaf for leaf, each in zip(leaves, alike, strict=True)])


def _stacked(tree: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf[None], tree)
