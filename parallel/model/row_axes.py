"""The mesh axes that rows are split over, for models whose rows depend on each other, such as those of batch norm.

    mean = lax.pmean(x.mean(0), spmdkit.batch_axes())      in a loss, or as axis_name= of a library's batch norm

Asked where a loss is traced, it names the axes over which the other rows of the batch are: several inside a step on a
mesh, none on one device, where a sum over no axis is the value itself. So one way of writing it is right everywhere.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from jax import lax

ROW_AXES = ("data", "fsdp", "expert")
"""Every mesh axis that may split the rows of a batch."""

_asked: ContextVar[list[bool] | None] = ContextVar("asked", default=None)


def batch_axes() -> tuple[str, ...]:
    """The mesh axes over which the rows of the batch are split, here and now.

    Call it inside the loss, while it is traced, and never where a module is made: outside a step there are none.

    Returns:
        Names for `lax.psum`, `lax.pmean` and the `axis_name` of a library; () on one device.
    """
    if (asked := _asked.get()) is not None:
        asked.append(True)
    return tuple(axis for axis in ROW_AXES if _size(axis) > 1)


def asks_for_batch_axes(function: Callable[..., Any], *arguments: Any) -> bool:
    """Tells whether a function asks for `batch_axes` when it is traced, so that its rows depend on each other.

    Args:
        function: Traceable.
        arguments: Arrays or their shapes.
    """
    with noticing() as asked:
        jax.eval_shape(lambda *given: function(*given), *arguments)  # a new function: no trace of an earlier one serves
    return bool(asked)


@contextmanager
def noticing() -> Iterator[list[bool]]:
    """A list that is empty until somebody asks for `batch_axes` inside the `with` block."""
    asked: list[bool] = []
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


def _size(axis: str) -> int:
    """Devices along an axis; 1 where none of that name is in force."""
    try:
        return lax.axis_size(axis)
    except NameError:
        return 1
