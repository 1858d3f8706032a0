"""A model as a stage of a pipeline calls it: embed, block and head, their gathers and casts of parameters inside."""

from collections.abc import Callable
from typing import NamedTuple

from jax import Array

from ..fsdp import attach
from ..model import Activations, Batch, BlockModel, Params
from ..model.loss_sums import LossSums, as_sums
from ..plan import ShardingPlan
from ..precision import Precision
from .forward import Kept
from .gathered_block import gathered_block
from .remat import remat_block


class ModelParts(NamedTuple):
    """The parts of a model, with all that happens to parameters before their use (casts, gathers) inside them.

    Attributes:
        embed: `embed(groups, whole, batch, key) -> x`; `groups` are the groups of parameters in `embed_reads`, to be
            differentiated, `whole` what was gathered for the whole step.
        block: `block(params, whole, x, key) -> x` for one block.
        head: `head(groups, whole, x, batch, key) -> LossSums`, this device's share; `groups` as in `head_reads`.
        embed_reads: groups that `embed` reads.
        head_reads: groups that `head` reads.
        gathers: whether blocks gather their parameters where they run.
        recomputes_output: whether a block that is recomputed makes its output, too; see `recomputes_output`.
    """

    embed: Callable[[Params, Params, Batch, Array | None], Activations]
    block: Callable[[Params, Params, Activations, Array | None], Activations]
    head: Callable[[Params, Params, Activations, Batch, Array | None], LossSums]
    embed_reads: tuple[str, ...]
    head_reads: tuple[str, ...]
    gathers: bool = False
    recomputes_output: bool = False


def make_parts(model: BlockModel, plan: ShardingPlan, *, remat: str, precision: Precision) -> ModelParts:
    """The parts of a model, gathers and casts of their parameters included; the arguments: see `pipeline_loss`."""
    reduced, axes = plan.gradient_table.layouts, plan.gather_axes

    def ready(groups: Params, kept: Kept) -> Params:
        shards, whole, into = groups, {name: kept[name] for name in groups}, {name: reduced[name] for name in groups}
        return attach(shards, whole, into, axes, precision)

    def embed(groups: Params, kept: Kept, batch: Batch, key: Array | None) -> Activations:
        return model.embed(ready(groups, kept), batch, key)

    def head(groups: Params, kept: Kept, x: Activations, batch: Batch, key: Array | None) -> LossSums:
        return as_sums(model.head(ready(groups, kept), x, batch, key))

    block = gathered_block(model, plan, precision)
    block = remat_block(block, remat, makes_copies=False, in_loop=True)
    return ModelParts(
        embed=embed,
        block=lambda shards, kept, x, key: block(x, shards, kept, key),
        head=head,
        embed_reads=model.embed_reads,
        head_reads=model.head_reads,
        gathers=plan.gathers_blocks and not plan.keeps_blocks,
        recomputes_output=recomputes_output(plan, remat),
    )


def recomputes_output(plan: ShardingPlan, remat: str) -> bool:
    """Whether a block that a pipeline recomputes makes its output, which nobody reads, too.

    It is left out where what goes with it is known: not where the block gathers, whose last gather would go as well,
    and not under remat `dots`, which may not need the last collectives of a block either.

    Args:
        plan: Where the blocks live.
        remat: What blocks keep for backward.
    """
    return plan.gathers_blocks or remat == "dots"
