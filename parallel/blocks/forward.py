"""The loss of one device's rows, from a model and its layouts: each block is gathered, run and dropped."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..data import make_varying, reduces_in_backward, sum_in_backward
from ..fsdp import attach, gather
from ..model import Activations, Batch, BlockModel, Model, Params, fold_block, has_state
from ..model.loss_sums import LossSums, as_sums
from ..plan import ShardingPlan
from ..xla.ordered_collectives import order_after, scatter_first
from ..zero import gradient_carriers
from .ends import Ends, run_with_ends, separates_ends
from .gathered_block import gathered_block, remat_block
from .prefetch import check_prefetch, prefetches_blocks, run_prefetched

Kept: TypeAlias = Any
"""Parameters that the loss reads in addition to those that it is differentiated with respect to: whole parameters in
the compute dtype that are kept for the entire step and, for blocks that are gathered one by one, the shards of the
frozen ones."""


class LocalLoss(NamedTuple):
    """One device's share of the loss as a function of its shards, to run inside `shard_map`.

    Attributes:
        keep: `keep(params) -> kept`: gathers the parameters that stay whole for the entire step; called once, before
            the microbatches.
        carriers: `carriers(params) -> shards`: the variables to differentiate with respect to, in the layout of the
            gradients; None in place of frozen parameters.
        loss: `loss(shards, kept, batch, key, state) -> LossSums`, this device's share of all sums; `state` is the
            model's state, () if it has none.
        differentiate: `differentiate(shards, kept, batch, key, state, scale) -> (LossSums, gradients)`, if it is not
            autodiff of `loss`. The gradients are those of `scale` times the loss; a `scale` of None means 1.
        summed: The groups of parameters whose gradients backward sums over all axes; these parameters vary only over
            the axes that split them.
    """

    keep: Callable[[Params], Kept]
    carriers: Callable[[Params], Params]
    loss: Callable[[Params, Kept, Batch, Array | None, Any], LossSums]
    differentiate: Callable[..., tuple[LossSums, Params]] | None = None
    summed: tuple[str, ...] = ()


def local_loss(model: Model | BlockModel, plan: ShardingPlan) -> LocalLoss:
    """Combines a model with the gathering of its parameters.

    Args:
        model: The model, split over the axes inside it. The blocks of a `BlockModel` are gathered one at a time, all
            other parameters once per step.
        plan: The plan, with the options of the step.
    """
    if isinstance(model, BlockModel):
        return _block_loss(model, plan)
    stored, reduced, axes = plan.used_table.layouts, plan.gradient_table.layouts, plan.gather_axes
    precision = plan.options.precision
    keep = partial(gather, layouts=stored, axes=axes, precision=precision)

    def loss(shards: Params, kept: Kept, batch: Batch, key: Array | None, state: Any) -> LossSums:
        more = (state,) if has_state(model) else ()
        sums = model.loss(attach(shards, kept, reduced, axes, precision), batch, key, *more)
        return as_sums(sums, precision.reduce)

    return LocalLoss(keep, partial(carriers, plan), loss)


def carriers(plan: ShardingPlan, params: Params) -> Params:
    """Returns the variables that the loss is differentiated with respect to, see `LocalLoss`."""
    layouts = plan.trained.used_table.layouts, plan.trained.gradient_table.layouts
    _, trained = plan.split_frozen(params)
    return gradient_carriers(trained, *layouts) if plan.zero == 2 else trained


def keep_for_step(plan: ShardingPlan, params: Params) -> Kept:
    """Returns the parameters of a `BlockModel` that are kept for an entire step, from all parameters."""
    stored, axes, precision = plan.used_table.layouts, plan.gather_axes, plan.options.precision
    if plan.keeps_blocks:
        return gather(make_varying(params, stored, plan.summed_axes), stored, axes, precision)
    outside, layouts = without_blocks(params), without_blocks(stored)
    outside = gather(make_varying(outside, layouts, plan.summed_axes), layouts, axes, precision)
    return {**outside, "blocks": plan.split_frozen(params)[0]["blocks"]}


def first_block(plan: ShardingPlan, params: Params) -> tuple[Params, Params]:
    """Returns the first block's parameters as loops over blocks pass them to `gathered_block`.

    The results are those of `carriers` and of `keep_for_step`, so that a block that is traced alone has the arguments
    that it has in the step, whichever parameters are frozen and whatever the plan keeps.

    Args:
        plan: The plan, with the options of the step.
        params: A device's parameters of a `BlockModel`, as the step stores them.
    """
    trained = carriers(plan, params)["blocks"]
    kept = keep_for_step(plan, params)["blocks"]
    shards = jax.tree.map(lambda leaf: leaf[0], trained)
    return shards, jax.tree.map(lambda leaf: leaf[0], kept)


def _block_loss(model: BlockModel, plan: ShardingPlan) -> LocalLoss:
    reduced, axes, gathers = plan.gradient_table.layouts, plan.gather_axes, plan.gathers_blocks
    precision, prefetches = plan.options.precision, prefetches_blocks(plan)
    block, unroll = block_of_loop(model, plan)
    copies_outside_loops = _makes_copies(plan) and unroll == model.num_blocks
    if prefetches:
        check_prefetch(model.num_blocks, plan.options.remat)
    head_alone = [name for name in model.head_reads if name not in model.embed_reads]
    separate, trained = separates_ends(model, plan), plan.trained.gradient_table.layouts
    summed = tuple(plan.trained.gradient_table.layouts if separate else ["blocks"]) if reduces_in_backward(plan) else ()

    def loss(shards: Params, kept: Kept, batch: Batch, key: Array | None, state: Any) -> LossSums:
        kept_outside = without_blocks(kept)

        def attached(own: Params) -> Params:
            if summed and separate:
                own = sum_in_backward(own, part_of(own, trained), plan.summed_axes, precision.reduce)
            whole, into = (part_of(own, tree) for tree in (kept_outside, reduced))
            return attach(own, whole, into, axes, precision)

        def body(x: Activations, layer: tuple[Params, Params, Array]) -> tuple[Activations, None]:
            block_shards, block_kept, index = layer
            return block(x, block_shards, block_kept, fold_block(key, index)), None

        blocks, kept_blocks, batch = shards["blocks"], kept["blocks"], dict(batch)
        if copies_outside_loops:  # otherwise XLA makes the copies once, before a loop over microbatches, and keeps them
            if jax.tree.leaves(kept_blocks):  # a separate barrier: together with trained ones they would get a gradient
                kept_blocks, batch = lax.optimization_barrier((kept_blocks, batch))
            blocks, batch = lax.optimization_barrier((blocks, batch))
        embedding, head_shards = part_of(model.embed_reads, shards), part_of(head_alone, shards)
        if separate:
            key_data = None if key is None else jax.random.key_data(key)
            x, head_shards = run_with_ends(
                partial(Ends, model, plan, num_blocks=model.num_blocks),
                lambda shards: model.embed(attached(shards), batch, key),
                (blocks, kept_blocks),
                embedding,
                head_shards,
                key_data,
            )
            return as_sums(model.head(attached(head_shards), x, batch, key), precision.reduce)
        embed_params = attached(embedding)
        x = model.embed(embed_params, batch, key)
        if gathers:
            x = order_after(kept_outside, x)
        if prefetches:
            x = run_prefetched(model, plan, (blocks, kept_blocks), x, key)
        else:
            x, _ = lax.scan(body, x, (blocks, kept_blocks, jnp.arange(model.num_blocks)), unroll=unroll)
        if gathers:
            head_shards, x = scatter_first(head_shards, x)
        head_params = part_of(model.head_reads, {**embed_params, **attached(head_shards)})
        return as_sums(model.head(head_params, x, batch, key), precision.reduce)

    return LocalLoss(partial(keep_for_step, plan), partial(carriers, plan), loss, summed=summed)


def block_of_loop(
    model: BlockModel, plan: ShardingPlan
) -> tuple[Callable[[Activations, Params, Params | None, Array | None], Activations], int]:
    """Returns the function of one block in the loop over blocks (see `gathered_block`), and the blocks per turn.

    Args:
        model: The model, split over the axes inside it.
        plan: The plan, with the options of the step.
    """
    makes_copies = _makes_copies(plan)
    unroll = blocks_per_turn(model, makes_copies=makes_copies)
    block, in_loop = gathered_block(model, plan), unroll < model.num_blocks
    return remat_block(block, plan.options.remat, makes_copies=makes_copies, in_loop=in_loop), unroll


def _makes_copies(plan: ShardingPlan) -> bool:
    precision = plan.options.precision
    return not plan.keeps_blocks and (plan.gathers_blocks or precision.compute != precision.params)


def blocks_per_turn(model: BlockModel, *, makes_copies: bool) -> int:
    """Returns the number of blocks in one turn of the loop over blocks; a divisor of all blocks if copies are made.

    Otherwise the remaining blocks would run outside the loop, and the residuals of both would be copied together.
    """
    limit = min(model.scan_unroll, model.num_blocks)
    return max(size for size in range(1, limit + 1) if not makes_copies or model.num_blocks % size == 0)


def without_blocks(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns the groups of parameters outside the blocks."""
    return {name: value for name, value in tree.items() if name != "blocks"}


def part_of(names: Iterable[str], tree: dict[str, Any]) -> dict[str, Any]:
    """Returns some groups of parameters."""
    return {name: tree[name] for name in names}
