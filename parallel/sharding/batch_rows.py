"""Can a batch be split as a plan splits it? Said before anything is compiled."""

from ...mesh.errors import UserError
from ..plan import ShardingPlan


def check_rows(plan: ShardingPlan, global_batch: int, accumulate: int = 1) -> None:
    """Checks that a batch of training can be split.

    Args:
        plan: The plan.
        global_batch: Rows of the batch.
        accumulate: Microbatches of a step.

    Raises:
        UserError: The number of rows is no multiple of shards times microbatches.
    """
    split = plan.rows(accumulate)
    if split.fits(global_batch):
        return
    over = str(plan.eval_rows)
    if plan.pipeline:
        over += f", strategy.pipe.microbatches {plan.pipeline.schedule.microbatches}"
    raise UserError(
        f"A batch of {global_batch} rows cannot be split over {over} and accumulate {accumulate}: "
        f"{global_batch} % {split.total} = {global_batch % split.total}. Set train.global_batch to a multiple of "
        f"{split.total} ({split.nearest(global_batch)} is the nearest), or change strategy or train.accumulate."
    )


def check_eval_rows(plan: ShardingPlan, rows: int) -> None:
    """Checks that a batch of an evaluation can be split.

    Raises:
        UserError: The number of rows is no multiple of the shards.
    """
    split = plan.eval_rows
    if split.fits(rows):
        return
    remainder = f": {rows} % {split.total} = {rows % split.total}" if rows > 0 else ""
    raise UserError(
        f"An evaluation's batch of {rows} rows cannot be split over {split}{remainder}. Pad it to a multiple "
        f"of {split.total} with rows of weight 0, as spmdkit.eval_batches does."
    )
