"""From a model and its layouts to the loss of one device's rows: gather, run, drop, block by block."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..fsdp import attach, gather
from ..model import Activations, Batch, BlockModel, Model, Params, fold_block, has_state
from ..model.loss_sums import LossSums, as_sums
from ..plan import ShardingPlan
from ..precision import Precision
from ..xla.in_order import after, scatter_first
from ..zero import gradient_carriers
from .gathered_block import block_layouts, gathered_block
from .prefetch import check_prefetch, prefetches_blocks, run_prefetched
from .remat import remat_block

Kept: TypeAlias = Any
"""Parameters that the loss reads beside what it is differentiated with respect to: whole ones in the compute dtype that
are kept for a whole step, and for blocks that are not among them, the shards of those that do not train."""


class LocalLoss(NamedTuple):
    """The share of the loss of one device as a function of its shards, to run inside `shard_map`.

    Attributes:
        keep: `keep(params) -> kept`: gathers what stays whole for the whole step; once, before any microbatch.
        carriers: `carriers(params) -> shards`: what to differentiate with respect to, in the layout of the gradients;
            None in place of what does not train.
        loss: `loss(shards, kept, batch, key, state) -> LossSums`, this device's share of all sums; `state` is the
            model's, () where it has none.
        differentiate: `differentiate(shards, kept, batch, key, state, scale) -> (LossSums, gradients)`, where it is not
            autodiff of `loss`; the gradients are those of `scale` times the loss, None being 1.
    """

    keep: Callable[[Params], Kept]
    carriers: Callable[[Params], Params]
    loss: Callable[[Params, Kept, Batch, Array | None, Any], LossSums]
    differentiate: Callable[[Params, Kept, Batch, Array | None, Any, Array | None], tuple[LossSums, Params]] | None = (
        None
    )


def local_loss(model: Model | BlockModel, plan: ShardingPlan, *, remat: str, precision: Precision) -> LocalLoss:
    """Composes a model with the gathering of its parameters.

    Args:
        model: The model, split over the axes inside it; a `BlockModel`'s blocks are gathered one at a time, everything
            else once a step.
        plan: Where its parameters and gradients live.
        remat: What blocks keep for backward, one of `REMAT_POLICIES`.
        precision: The compute and reduce dtypes.
    """
    if isinstance(model, BlockModel):
        return _block_loss(model, plan, remat, precision)
    stored, reduced, axes = plan.used_table.layouts, plan.gradient_table.layouts, plan.gather_axes

    def keep(params: Params) -> Kept:
        return gather(params, stored, axes, precision)

    def loss(shards: Params, kept: Kept, batch: Batch, key: Array | None, state: Any) -> LossSums:
        more = (state,) if has_state(model) else ()
        return as_sums(model.loss(attach(shards, kept, reduced, axes, precision), batch, key, *more))

    return LocalLoss(keep, carriers_of(plan), loss)


def carriers_of(plan: ShardingPlan) -> Callable[[Params], Params]:
    """Returns the function that makes of parameters what the loss is differentiated with respect to."""
    layouts = plan.trained.used_table.layouts, plan.trained.gradient_table.layouts

    def carriers(params: Params) -> Params:
        _, trained = plan.split_frozen(params)
        return gradient_carriers(trained, *layouts) if plan.zero == 2 else trained

    return carriers


def keep_for_step(plan: ShardingPlan, precision: Precision) -> Callable[[Params], Kept]:
    """Returns the function that makes of the parameters of a model in blocks what is kept for a whole step."""
    stored, axes = plan.used_table.layouts, plan.gather_axes

    def keep(params: Params) -> Kept:
        if plan.keeps_blocks:
            return gather(params, stored, axes, precision)
        outside = gather(without_blocks(params), without_blocks(stored), axes, precision)
        return {**outside, "blocks": plan.split_frozen(params)[0]["blocks"]}

    return keep


def _block_loss(model: BlockModel, plan: ShardingPlan, remat: str, precision: Precision) -> LocalLoss:
    reduced, axes, gathers = plan.gradient_table.layouts, plan.gather_axes, plan.gathers_blocks
    block, unroll = block_of_loop(model, plan, remat, precision)
    copies_outside_loops = _makes_copies(plan, precision) and unroll == model.num_blocks

    prefetches = prefetches_blocks(plan)
    if prefetches:
        check_prefetch(model.num_blocks, remat)
    head_alone = [name for name in model.head_reads if name not in model.embed_reads]
    one_stored, one_reduced = block_layouts(plan)
    prefetched = partial(
        run_prefetched,
        model.block,
        stored=one_stored,
        reduced=one_reduced,
        axes=axes,
        precision=precision,
        remat=remat,
    )

    def loss(shards: Params, kept: Kept, batch: Batch, key: Array | None, state: Any) -> LossSums:
        kept_outside = without_blocks(kept)

        def attached(own: Params) -> Params:
            whole, into = (part_of(own, tree) for tree in (kept_outside, reduced))
            return attach(own, whole, into, axes, precision)

        def body(x: Activations, layer: tuple[Params, Params, Array]) -> tuple[Activations, None]:
            block_shards, block_kept, index = layer
            return block(x, block_shards, block_kept, fold_block(key, index)), None

        blocks, kept_blocks, batch = shards["blocks"], kept["blocks"], dict(batch)
        if copies_outside_loops:  # else they are made once, before a loop over microbatches, and kept
            if jax.tree.leaves(kept_blocks):  # apart from what trains, with which it would get a gradient
                kept_blocks, batch = lax.optimization_barrier((kept_blocks, batch))
            blocks, batch = lax.optimization_barrier((blocks, batch))
        embed_params = attached(part_of(model.embed_reads, shards))
        x = model.embed(embed_params, batch, key)
        if gathers:
            x = after(kept_outside, x)
        if prefetches:
            x = prefetched(blocks, kept_blocks, x, key)
        else:
            layers = (blocks, kept_blocks, jnp.arange(model.num_blocks))
            x, _ = lax.scan(body, x, layers, unroll=unroll)
        head_shards = part_of(head_alone, shards)
        if gathers:
            head_shards, x = scatter_first(head_shards, x)
        head_params = part_of(model.head_reads, {**embed_params, **attached(head_shards)})
        return as_sums(model.head(head_params, x, batch, key))

    return LocalLoss(keep_for_step(plan, precision), carriers_of(plan), loss)


def block_of_loop(
    model: BlockModel, plan: ShardingPlan, remat: str, precision: Precision
) -> tuple[Callable[[Activations, Params, Params | None, Array | None], Activations], int]:
    """One block as the loop over blocks runs it, see `gathered_block`, and how many of them one turn holds.

    Args:
        model: The model, split over the axes inside it.
        plan: Where its parameters and gradients live.
        remat: What the block keeps for backward.
        precision: The compute and reduce dtypes.
    """
    makes_copies = _makes_copies(plan, precision)
    unroll = blocks_in_turn(model, makes_copies=makes_copies)
    block = gathered_block(model, plan, precision)
    return remat_block(block, remat, makes_copies=makes_copies, in_loop=unroll < model.num_blocks), unroll


def _makes_copies(plan: ShardingPlan, precision: Precision) -> bool:
    return not plan.keeps_blocks and (plan.gathers_blocks or precision.compute != precision.params)


def blocks_in_turn(model: BlockModel, *, makes_copies: bool) -> int:
    """How many blocks one turn of the loop over blocks holds; what divides their number, where copies are made.

    A rest of blocks would run outside the loop, and what autodiff keeps of both be copied together.
    """
    most = min(model.scan_unroll, model.num_blocks)
    return max(size for size in range(1, most + 1) if not makes_copies or model.num_blocks % size == 0)


def without_blocks(tree: dict[str, Any]) -> dict[str, Any]:
    """The groups of parameters outside the blocks."""
    return {name: value for name, value in tree.items() if name != "blocks"}


def part_of(names: Iterable[str], tree: dict[str, Any]) -> dict[str, Any]:
    """Some groups of parameters."""
    return {name: tree[name] for name in names}
