"""How the rows of a batch are split over the mesh: the axes, and whether a number of rows fits.

A model with rows that depend on each other, such as batch norm, sums over the axes that split the rows:

    mean = lax.pmean(x.mean(0), spmdkit.batch_axes())      in a loss, or as axis_name= of a library's batch norm

`batch_axes` returns the axes in force where the loss is traced: several inside a step on a mesh, and none on one
device, where a sum over zero axes is the value itself. The same code is therefore correct everywhere.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from ...mesh.errors import UserError
from ..collectives import axis_size
from ..plan import ShardingPlan
from .strategies import axes_that_split

_requests: ContextVar[list[bool] | None] = ContextVar("requests", default=None)


def batch_axes() -> tuple[str, ...]:
    """Returns the mesh axes that split the rows of the batch where this is traced.

    Call it inside the loss, while it is traced, and never where a module is constructed: outside a step it returns ().

    Returns:
        Names for `lax.psum`, `lax.pmean` and the `axis_name` of a library; () on one device.
    """
    if (requests := _requests.get()) is not None:
        requests.append(True)
    return tuple(axis for axis in axes_that_split("rows") if axis_size(axis) > 1)


def uses_batch_axes(function: Callable[..., Any], *arguments: Any) -> bool:
    """Returns whether a function calls `batch_axes` when it is traced, so that its rows depend on each other.

    Args:
        function: A traceable function.
        arguments: Arrays or their shapes.
    """
    with record_batch_axes() as requests:
        jax.eval_shape(lambda *given: function(*given), *arguments)  # a new lambda, so that no cached trace is used
    return bool(requests)


@contextmanager
def record_batch_axes() -> Iterator[list[bool]]:
    """Yields a list that gets an entry at every call of `batch_axes` inside the `with` block."""
    requests: list[bool] = []
    token = _requests.set(requests)
    try:
        yield requests
    finally:
        _requests.reset(token)


def check_rows(plan: ShardingPlan, global_batch: int, accumulate: int = 1) -> None:
    """Checks that a training batch can be split.

    Args:
        plan: The plan.
        global_batch: The number of rows in the batch.
        accumulate: The number of microbatches in a step.

    Raises:
        UserError: The number of rows is not a multiple of shards x microbatches.
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
    """Checks that an evaluation batch can be split.

    Raises:
        UserError: The number of rows is not a multiple of the number of shards.
    """
    split = plan.eval_rows
    if split.fits(rows):
        return
    raise UserError(
        f"An evaluation batch of {rows} rows cannot be split over {split}: {rows} % {split.total} = "
        f"{rows % split.total}. Pad it to a multiple of {split.total} with rows of weight 0, as spmdkit.eval_batches "
        "does."
    )
