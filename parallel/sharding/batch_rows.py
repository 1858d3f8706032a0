"""The split of a batch's rows over the mesh: its axes, and checks of the number of rows.

A model with rows that depend on each other, such as one with batch norm, sums over the axes that split the rows:

    mean = lax.pmean(x.mean(0), spmdkit.batch_axes())      in a loss, or as axis_name= of a library's batch norm

`batch_axes` returns the axes of the current trace: inside a step on a mesh, those that split rows; on one device, none.
A sum over zero axes is the value itself, so the same code is correct in both cases.
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
    """Returns the mesh axes that split the rows of the batch in the current trace.

    Call it inside the loss, which is traced, and never while a module is constructed: outside a step it returns ().

    Returns:
        Names for `lax.psum`, `lax.pmean` and the `axis_name` of a library; () on one device.
    """
    if (requests := _requests.get()) is not None:
        requests.append(True)
    return tuple(axis for axis in axes_that_split("rows") if axis_size(axis) > 1)


def uses_batch_axes(function: Callable[..., Any], *arguments: Any) -> bool:
    """Returns whether a function calls `batch_axes` when it is traced, which means that its rows depend on each other.

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
