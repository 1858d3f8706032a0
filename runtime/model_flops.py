"""The operations of a run's model: those that it states, or those of its traced loss."""

from dataclasses import replace

from ..data.batches import further_batches
from ..parallel.model import BlockModel, Model
from ..parallel.sharding.loss_work import loss_work
from ..parallel.xla.program_work import Work
from .build_run import Built


def model_work(built: Built) -> Work:
    """Returns the work of the loss and its gradients for the rows of one device in one microbatch."""
    local = built.step.plan.rows(built.step.accumulate).part(built.batch)
    return loss_work(built.model, local, built.step.precision, mesh_axes(built))


def mesh_axes(built: Built) -> dict[str, int]:
    """Returns the axes that a step splits itself -> their sizes."""
    plan = built.step.plan
    return {axis: plan.mesh.axis_size(axis) for axis in plan.manual_axes}


def with_counted_flops(built: Built, work: Work | None = None) -> Model | BlockModel:
    """Returns the model with `flops_per_row`, counted in its traced loss if the model does not state it.

    Args:
        built: The run.
        work: The result of `model_work`, if it is known already.

    Returns:
        The model; with `flops_per_row` None if its operations are unknown, or if it has no products.
    """
    model = built.model
    if model.flops_per_row is not None:
        return model
    work = work or model_work(built)
    if work.uncounted or not work.flops:
        return model
    global_batch = built.config.train.global_batch
    split = built.step.plan.rows(built.step.accumulate)
    rows = global_batch // split.total
    counted = replace(model, flops_per_row=work.flops / rows)
    of_length: dict[int, float] = {}
    for batch in further_batches(built.splits.train, global_batch, built.layouts.batch_sharding(abstract=True)):
        shorter = loss_work(model, split.part(batch), built.step.precision, mesh_axes(built))
        of_length[batch["weights"].shape[1]] = shorter.flops / rows
    if not of_length:
        return counted
    return replace(counted, flops_of_length=lambda length: of_length.get(length, work.flops / rows))
