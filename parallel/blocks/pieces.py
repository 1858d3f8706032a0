"""A model in pieces, embed, block and head, with the gathers and casts of parameters inside them."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import Array

from ..fsdp import attach, gather
from ..model import Activations, Batch, BlockModel, Params
from ..plan import ShardingPlan
from ..precision import Precision
from ..xla.in_order import apart
from .forward import Kept, as_scalars, without_block_dim
from .remat import remat_block


class Pieces(NamedTuple):
    """A model in pieces, with all that happens to parameters before their use (casts, gathers) inside them.

    Attributes:
        embed: `embed(groups, whole, batch, key) -> x`; `groups` are the groups of parameters in `embed_reads`, to be
            differentiated, `whole` what was gathered for the whole step.
        block: `block(params, whole, x, key) -> x` for one block.
        head: `head(groups, whole, x, batch, key) -> (sum, weight)`, this device's share; `groups` as in `head_reads`.
        embed_reads: groups that `embed` reads.
        head_reads: groups that `head` reads.
        gathers: whether blocks gather their parameters.
        whole_again: whether a block that is computed again makes its output, too; see `computes_whole_again`.
    """

    embed: Callable[[Params, Params, Batch, Array | None], Activations]
    block: Callable[[Params, Params, Activations, Array | None], Activations]
    head: Callable[[Params, Params, Activations, Batch, Array | None], tuple[Array, Array]]
    embed_reads: tuple[str, ...]
    head_reads: tuple[str, ...]
    gathers: bool = False
    whole_again: bool = False


def make_pieces(model: BlockModel, layouts: ShardingPlan, *, remat: str, precision: Precision) -> Pieces:
    """The pieces of a model, gathers and casts of their parameters included; the arguments: see `pipeline_loss`."""
    stored, reduced, axes = layouts.used_table.layouts, layouts.gradient_table.layouts, layouts.gather_axes
    block_stored, block_reduced = (jax.tree.map(without_block_dim, tree["blocks"]) for tree in (stored, reduced))
    gathers = layouts.gathers_blocks

    def outer(groups: Params, kept: Kept) -> Params:
        shards, whole, into = groups, {name: kept[name] for name in groups}, {name: reduced[name] for name in groups}
        return attach(shards, whole, into, axes, precision)

    def embed(groups: Params, kept: Kept, batch: Batch, key: Array | None) -> Activations:
        return model.embed(outer(groups, kept), batch, key)

    def block(x: Activations, shards: Params, kept: Params | None, key: Array | None) -> Activations:
        whole = gather(shards, block_stored, axes, precision) if kept is None else kept
        params = attach(shards, whole, block_reduced, axes, precision)
        if gathers and layouts.loops_in_blocks:
            params, x = apart(params, x)
        return model.block(params, x, key)

    def head(groups: Params, kept: Kept, x: Activations, batch: Batch, key: Array | None) -> tuple[Array, Array]:
        return as_scalars(model.head(outer(groups, kept), x, batch, key))

    kept_block = remat_block(block, remat, makes_copies=False, in_loop=True)
    return Pieces(
        embed=embed,
        block=lambda shards, kept, x, key: kept_block(x, shards, kept, key),
        head=head,
        embed_reads=model.embed_reads,
        head_reads=model.head_reads,
        gathers=gathers,
        whole_again=computes_whole_again(layouts, remat),
    )


def computes_whole_again(layouts: ShardingPlan, remat: str) -> bool:
    """Whether a block that a pipeline computes again makes its output, which nobody reads, too.

    It is left out where what goes with it is known: not where the block gathers, whose last gather would go as well,
    and not under remat `dots`, which may not need the last collectives of a block either.

    Args:
        layouts: Where the blocks live.
        remat: What blocks keep for backward.
    """
    return layouts.gathers_blocks or remat == "dots"
