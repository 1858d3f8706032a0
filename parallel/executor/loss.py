"""The loss of one device of a pipeline, and its gradients, as a step wants them: `forward.local_loss` with stages."""

from collections.abc import Mapping
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from ...mesh.keys import make_key
from ..blocks.differentiable import split_differentiable
from ..blocks.forward import Kept, LocalLoss, carriers_of, without_blocks
from ..blocks.pieces import make_pieces
from ..collectives import Collective, wire_bytes
from ..fsdp import gather
from ..model import Activations, Batch, BlockModel, Params
from ..pipeline import AXIS, Pipeline, forwards_only
from ..plan import Layouts
from ..precision import Precision
from ..schedule.timetable import make_timetable
from .embed_and_head import gather_embed_and_head
from .run import run_forward, run_gradients
from .stage import Inputs


def pipeline_loss(model: BlockModel, layouts: Layouts, *, remat: str, precision: Precision) -> LocalLoss:
    """Composes a model in stages with the gathering of its parameters.

    Args:
        model: The model, split over the axes inside it.
        layouts: Where its parameters and gradients live; `layouts.pipeline` is the pipeline.
        remat: What blocks keep for backward: `none` leaves it to the cut (see `blocks/split_backward.py`).
        precision: The compute and reduce dtypes.
    """
    pipeline = layouts.pipeline
    assert pipeline is not None
    stored, axes = layouts.table.layouts, layouts.gather_axes
    keeps_blocks = layouts.zero == 2 or layouts.fsdp.keep == "step"
    pieces = make_pieces(model, layouts, remat=remat, precision=precision)

    def keep(params: Params) -> Kept:
        if keeps_blocks:
            return gather(params, stored, axes, precision)
        return gather(without_blocks(params), without_blocks(stored), axes, precision)

    def loss(shards: Params, kept: Kept, batch: Batch, key: Array | None) -> tuple[Array, Array]:
        timetable = _of_forwards(pipeline, batch)
        return run_forward(pieces, timetable, Inputs(shards, kept, batch, key), axes=layouts.manual_axes)

    def differentiate(
        shards: Params, kept: Kept, batch: Batch, key: Array | None
    ) -> tuple[tuple[Array, Array], Params]:
        inputs = Inputs(shards, kept, batch, key)
        gradients, sums = run_gradients(pieces, pipeline.timetable, inputs, axes=layouts.manual_axes)
        return sums, gradients

    return LocalLoss(keep, carriers_of(layouts), loss, differentiate)


def _of_forwards(pipeline: Pipeline, batch: Batch) -> Any:
    """A timetable of forwards; an evaluation's rows may not be divisible by the microbatches of training."""
    rows = next(iter(batch.values())).shape[0]
    schedule = forwards_only(pipeline.schedule, gcd(rows, pipeline.schedule.microbatches))
    return make_timetable(schedule, pipeline.stages)


def pipeline_cost(
    model: BlockModel,
    layouts: Layouts,
    microbatch: Mapping[str, jax.ShapeDtypeStruct],
    precision: Precision,
    accumulate: int,
    *,
    platform: str,
) -> list[Collective]:
    """The permutes of one step: two a tick, each of one microbatch's activations as a device holds them.

    Args:
        model: The model, split over the axes inside it.
        layouts: Where its parameters live.
        microbatch: Per-device shapes of one microbatch.
        precision: The dtypes.
        accumulate: How many times a step runs the schedule.
        platform: Where the step runs; it decides the bytes of 16-bit numbers, see `wire_bytes`.
    """
    assert layouts.pipeline is not None
    timetable = layouts.pipeline.timetable
    differentiable, others = split_differentiable(_activation_shapes(model, layouts, microbatch, precision))
    up, down = [*differentiable, *others], [*differentiable, *others] if timetable.both_ways else differentiable
    times = accumulate * len(timetable.entries.kind)
    sizes = [leaf.size * wire_bytes(leaf.dtype, platform) for leaf in (*up, *down)]
    return [Collective("collective-permute", (AXIS,), times * len(sizes), times * sum(sizes))]


def _activation_shapes(
    model: BlockModel, layouts: Layouts, microbatch: Mapping[str, jax.ShapeDtypeStruct], precision: Precision
) -> Activations:
    """What flows between the blocks of one device, as the embedding makes it."""
    pieces = make_pieces(model, layouts, remat="none", precision=precision)
    found: list[Activations] = []

    def local(params: Params, rows: Batch) -> Array:
        params = gather_embed_and_head(params, layouts.table.layouts)
        kept = gather(without_blocks(params), without_blocks(layouts.table.layouts), layouts.gather_axes, precision)
        groups = {name: params[name] for name in model.embed_reads}
        batch = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in microbatch.items()}
        x = pieces.embed(groups, kept, batch, make_key(0))
        found.append(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), x))
        return jnp.zeros(())

    specs = layouts.manual_specs(layouts.table)
    mapped = jax.shard_map(
        local,
        mesh=layouts.mesh.abstract_mesh,
        in_specs=(specs, PartitionSpec()),
        out_specs=PartitionSpec(),
        axis_names=set(layouts.manual_axes),
        check_vma=False,
    )
    jax.eval_shape(mapped, layouts.table.abstract_arrays, {})
    return found[0]
