"""Tolerances that are wider than those of the dtype that both sides compute in, each with its array and the reason."""

from collections.abc import Iterator
from typing import NamedTuple

from ..precision import Precision
from .differences import ArrayErrors, LeafError
from .rounding import TOLERANCES, Narrowing, width

INIT_TOLERANCE = 1e-5
"""Most models draw their initial parameters in float32."""

KINDS = {"params": "parameters", "optimizer": "optimizer's state", "model_state": "the model's state"}
"""The kinds of arrays, as the table of errors has them."""


class Widened(NamedTuple):
    """A tolerance that was widened, or elements that were left out.

    Attributes:
        what: The quantities that are compared with it.
        array: The array that rounding affects.
        tolerance: The largest relative error that is allowed; None if elements are left out.
        reason: The measurement, or the line, that explains it.
    """

    what: str
    array: str
    tolerance: float | None
    reason: str

    def __str__(self) -> str:
        bound = "" if self.tolerance is None else f" to {self.tolerance:.1e}"
        return f"{self.what}{bound}: {self.array} {self.reason}"


def widened(
    init: LeafError, errors: ArrayErrors, narrowings: tuple[Narrowing, Narrowing], precision: Precision
) -> Iterator[Widened]:
    """Lists the tolerances that were widened.

    Args:
        init: The worst initial parameter.
        errors: The comparison of all arrays.
        narrowings: The narrowest numbers of the loss, and of the update.
        precision: The dtypes of the step.
    """
    usual = min((precision.params, precision.compute), key=width)
    if INIT_TOLERANCE >= init.relative > TOLERANCES[usual]:
        yield Widened("initial parameters", init.path, INIT_TOLERANCE, f"differs by {init.relative:.1e}")
    for what, narrowing in zip(("loss and gradients", "parameters and optimizer's state"), narrowings, strict=True):
        if narrowing.tolerance > TOLERANCES[usual]:
            place = f" at {narrowing.place}" if narrowing.place else ""
            reason = f"is cast to {narrowing.dtype}{place}"
            yield Widened(what, narrowing.array, narrowing.tolerance, reason)
    bounds = narrowings[0].tolerance, *[max(each.tolerance for each in narrowings)] * 3
    for (kind, arrays), bound in zip(errors._asdict().items(), bounds, strict=True):
        yield from _of_noise(KINDS.get(kind, kind), arrays, bound)


def _of_noise(kind: str, arrays: tuple[LeafError, ...], bound: float) -> Iterator[Widened]:
    """The arrays of one kind that rounding alone moves further than their size explains."""
    for array in sorted(arrays, key=lambda each: each.path):
        if array.left_out:
            reason = (
                f"is not compared in {array.left_out} elements: their gradient is rounding, which decides the update"
            )
            yield Widened(kind, array.path, None, reason)
        if array.wider > 1:
            reason = "is moved as far by one rounding of the parameters on one device"
            yield Widened(kind, array.path, array.wider * bound, reason)
