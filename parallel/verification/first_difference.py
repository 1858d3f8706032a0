"""Finds the first difference between training and one device, in causal order, and explains it."""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite

import numpy as np

from ...layouts.sizes import counted
from ..model import Params
from .case import Case
from .claims import frozen_parameters
from .diagnosis import (
    explain_gradient,
    explain_loss,
    explain_parameters,
    explain_sums,
    how_it_differs,
    leaf_of,
    times_reference,
)
from .differences import GRADIENTS, MODEL_STATE, OPTIMIZER, PARAMETERS
from .reference import Reference, Sums
from .result import NO_GRADIENT, NOT_FINITE, Difference, Verification


def explanations(
    case: Case,
    initial: Params,
    drawn: Params,
    found: Sums,
    norm: float,
    reference: Reference,
    losses: Sequence[float],
) -> dict[str, Callable[[str], str]]:
    """Returns a function for each quantity of the steps that explains its difference, given its worst array.

    Args:
        case: The training.
        initial: The initial parameters on the mesh, blocks in the model's order.
        drawn: The initial parameters of one device.
        found: The strategy's sums of the first batch.
        norm: The strategy's gradient norm of the first batch.
        reference: The training on one device.
        losses: The strategy's losses.
    """
    first, norms = reference.first, (norm, reference.norms[0])
    right = f"All parameters are right after {counted(len(losses), 'step')}"
    return {
        "initial parameters": lambda path: (
            "The same seed draws other parameters on this mesh: "
            + how_it_differs(*(np.asarray(leaf_of(tree, path), np.float64) for tree in (initial, drawn)))
        ),
        "loss": lambda _: explain_loss(case, found, first),
        "weight": lambda _: f"{explain_sums(found, first, case.tolerance)} Their ratio, the mean loss, is right.",
        GRADIENTS: lambda path: explain_gradient(case, path, found, first, norms),
        "gradient norm": lambda _: f"It is {times_reference(*norms)}, while every gradient is right.",
        PARAMETERS: lambda path: explain_parameters(case, path, losses, reference),
        OPTIMIZER: lambda _: (
            f"{right}. This array of the optimizer's state is not: it is what later updates begin with."
        ),
        MODEL_STATE: lambda _: (
            f"{right}. This array of the model's own state is not: the next state that the loss returns must be that "
            "of the whole batch, with statistics summed over spmdkit.batch_axes(); else each device has its own, and "
            "their mean is kept."
        ),
        "what a step reports": lambda name: f"{right}; the {name} is reported wrongly.",
    }


def first_difference(
    measured: Verification, reference: Reference, explain: Mapping[str, Callable[[str], str]]
) -> Difference | None:
    """Returns the first difference of the steps, in causal order; None if there is none."""
    loss = reference.losses[0]
    if len(frozen_parameters(reference)) == len(measured.gradients):
        hint = (
            f"Every gradient of the first batch is zero on one device as well, in all {len(measured.gradients)} "
            f"arrays, at a loss of {loss:.6g}: training would change nothing. The loss does not depend on the "
            "parameters: look for a factor of zero, a stop_gradient, rounding, or an argmax between the two."
        )
        return Difference(what=NO_GRADIENT, where="", relative=1.0, hint=hint)
    for what, error in measured.errors.items():
        if error.differs:
            hint = explain[what](error.where)
            name = NOT_FINITE if what == "loss" and not isfinite(loss) else what
            return Difference(what=name, where=error.where, relative=error.relative, hint=hint)
    if unexpected := measured.collectives.unexpected:
        hint = f"The numbers are right, but the collectives differ from the predictions: {'; '.join(unexpected)}."
        return Difference(what="collectives", where="", relative=float(len(unexpected)), hint=hint)
    return None
