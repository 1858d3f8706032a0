"""The parts of a model that a pipeline stage calls (embed, block, head), with the gathers and casts of parameters."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from ...mesh.keys import make_key
from ..fsdp import attach, gather
from ..model import AbstractBatch, Activations, Batch, BlockModel, Params
from ..model.loss_sums import LossSums, as_sums
from ..plan import ShardingPlan
from .forward import Kept, part_of, without_blocks
from .gathered_block import gathered_block, remat_block

Result = TypeVar("Result")


class ModelParts(NamedTuple):
    """The parts of a model, including the casts and gathers of parameters before their use.

    Attributes:
        embed: `embed(groups, whole, batch, key) -> x`; `groups` are the groups of parameters in `embed_reads`, to be
            differentiated, `whole` the parameters that were gathered for the entire step.
        block: `block(params, whole, x, key) -> x` for one block.
        head: `head(groups, whole, x, batch, key) -> LossSums`, this device's share; `groups` as in `head_reads`.
        embed_reads: The groups that `embed` reads.
        head_reads: The groups that `head` reads.
        gathers: Whether blocks gather their parameters when they run.
        recomputes_output: Whether a recomputed block computes its output too; see `recomputes_output`.
    """

    embed: Callable[[Params, Params, Batch, Array | None], Activations]
    block: Callable[[Params, Params, Activations, Array | None], Activations]
    head: Callable[[Params, Params, Activations, Batch, Array | None], LossSums]
    embed_reads: tuple[str, ...]
    head_reads: tuple[str, ...]
    gathers: bool = False
    recomputes_output: bool = False


def make_parts(model: BlockModel, plan: ShardingPlan) -> ModelParts:
    """Returns the parts of a model, which is split over the axes inside it."""
    reduced, axes, precision = plan.gradient_table.layouts, plan.gather_axes, plan.options.precision

    def attached(groups: Params, kept: Kept) -> Params:
        return attach(groups, part_of(groups, kept), part_of(groups, reduced), axes, precision)

    def embed(groups: Params, kept: Kept, batch: Batch, key: Array | None) -> Activations:
        return model.embed(attached(groups, kept), batch, key)

    def head(groups: Params, kept: Kept, x: Activations, batch: Batch, key: Array | None) -> LossSums:
        return as_sums(model.head(attached(groups, kept), x, batch, key), precision.reduce)

    block = remat_block(gathered_block(model, plan), plan.options.remat, makes_copies=False, in_loop=True)
    return ModelParts(
        embed=embed,
        block=lambda shards, kept, x, key: block(x, shards, kept, key),
        head=head,
        embed_reads=model.embed_reads,
        head_reads=model.head_reads,
        gathers=plan.gathers_blocks and not plan.keeps_blocks,
        recomputes_output=recomputes_output(plan),
    )


def recomputes_output(plan: ShardingPlan) -> bool:
    """Returns whether a block that a pipeline recomputes computes its output too, although no action reads it.

    The output is omitted only if the collectives that are omitted with it are known: not if the block gathers, because
    its last gather would be omitted too, and not under a remat policy that keeps products, which may not need the last
    collectives either.
    """
    return plan.gathers_blocks or plan.options.remat not in ("none", "full")


def on_activations(
    function: Callable[[Params, Activations], Result], model: BlockModel, plan: ShardingPlan, microbatch: AbstractBatch
) -> Result:
    """Calls a function inside the `shard_map` of a step, on traced values. Nothing runs.

    Args:
        function: `function(params, x) -> anything but traced values`, called with a device's parameters as the step
            stores them and with the output of the embedding for one microbatch.
        model: The model, split over the axes inside it.
        plan: The plan, with the options of the step.
        microbatch: The per-device shapes of one microbatch.

    Returns:
        The result of `function`.
    """
    parts, layouts = make_parts(model, plan), plan.used_table.layouts
    results: list[Result] = []

    def local(params: Params, rows: Batch) -> Array:
        kept = gather(without_blocks(params), without_blocks(layouts), plan.gather_axes, plan.options.precision)
        batch = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in microbatch.items()}
        groups = part_of(model.embed_reads, params)
        results.append(function(params, parts.embed(groups, kept, batch, make_key(0))))
        return jnp.zeros(())

    mapped = jax.shard_map(
        local,
        mesh=plan.mesh.abstract_mesh,
        in_specs=(plan.manual_specs(plan.used_table), PartitionSpec()),
        out_specs=PartitionSpec(),
        axis_names=set(plan.manual_axes),
        check_vma=False,
    )
    jax.eval_shape(mapped, plan.used_table.abstract_arrays, {})
    return results[0]
