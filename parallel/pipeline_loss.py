"""The loss of one device of a pipeline, and its gradients, as a step wants them: `forward.local_loss` with stages."""

from math import gcd
from typing import Any

import jax
from jax import Array

from .forward import Kept, LocalLoss, as_scalars, carriers_of, without_block_dim, without_blocks
from .fsdp import attach, gather
from .layouts import Layouts
from .model import Activations, Batch, BlockModel, Params
from .pipeline import Pipeline, forwards_only
from .pipeline_run import run_forward, run_gradients
from .pipeline_stage import Inputs, Pieces
from .precision import Precision
from .remat import remat_block
from .timetable import make_timetable


def pipeline_loss(model: BlockModel, layouts: Layouts, *, remat: str, precision: Precision) -> LocalLoss:
    """Composes a model in stages with the gathering of its parameters.

    Args:
        model: The model, split over the axes inside it.
        layouts: Where its parameters and gradients live; `layouts.pipeline` is the pipeline.
        remat: What blocks keep for backward: `none` leaves it to the cut (see `cut.py`).
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


def make_pieces(model: BlockModel, layouts: Layouts, *, remat: str, precision: Precision) -> Pieces:
    """The pieces of a model, gathers and casts of their parameters included; the arguments are `pipeline_loss`'s."""
    stored, reduced, axes = layouts.table.layouts, layouts.gradient_table.layouts, layouts.gather_axes
    block_stored, block_reduced = (jax.tree.map(without_block_dim, tree["blocks"]) for tree in (stored, reduced))

    def outer(groups: Params, kept: Kept) -> Params:
        shards, whole, into = groups, {name: kept[name] for name in groups}, {name: reduced[name] for name in groups}
        return attach(shards, whole, into, axes, precision)

    def embed(groups: Params, kept: Kept, batch: Batch, key: Array | None) -> Activations:
        return model.embed(outer(groups, kept), batch, key)

    def block(x: Activations, shards: Params, kept: Params | None, key: Array | None) -> Activations:
        whole = gather(shards, block_stored, axes, precision) if kept is None else kept
        return model.block(attach(shards, whole, block_reduced, axes, precision), x, key)

    def head(groups: Params, kept: Kept, x: Activations, batch: Batch, key: Array | None) -> tuple[Array, Array]:
        return as_scalars(model.head(outer(groups, kept), x, batch, key))

    kept_block = remat_block(block, remat, makes_copies=False, in_loop=True)
    return Pieces(
        embed=embed,
        block=lambda shards, kept, x, key: kept_block(x, shards, kept, key),
        head=head,
        embed_reads=model.embed_reads,
        head_reads=model.head_reads,
    )
