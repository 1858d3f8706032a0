"""The first thing in training that is not as on one device, in the order in which things follow, and its cause."""

from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from typing import NamedTuple

import jax

from ...layouts.sizes import counted
from ..step.state import StepMetrics
from . import diagnosis, update_cause
from .claims import frozen_parameters
from .differences import LeafError, relative
from .reference import Reference, Sums
from .result import NO_GRADIENT, NOT_FINITE, Difference, Verification
from .row_counts import Case
from .update_cause import Training


class Found(NamedTuple):
    """What was measured, beside the errors.

    Attributes:
        measured: the errors.
        init: the worst of the initial parameters.
        sums: the strategy's sums of the first batch.
        norm: the strategy's norm of the first batch.
        reference: the training on one device.
        case: what a cause is looked for with; made when it is needed.
        training: the steps, to be done again.
    """

    measured: Verification
    init: LeafError
    sums: Sums
    norm: float
    reference: Reference
    case: Callable[[], Case]
    training: Training


def first_difference(found: Found) -> Difference | None:
    """What differs first; None where nothing does."""
    return next(_differences(found), None)


def _differences(found: Found) -> Iterator[Difference]:
    yield from _of_model(found)
    yield from _of_first_batch(found)
    yield from _of_training(found)
    unexpected = found.measured.collectives.unexpected
    if unexpected:
        hint = "The numbers are right, but more or less moves than the strategies say: " + "; ".join(unexpected) + "."
        yield Difference(what="collectives", where="", relative=float(len(unexpected)), hint=hint)


def _of_model(found: Found) -> Iterator[Difference]:
    """What the model does on one device already."""
    gradients = found.measured.gradients
    if len(frozen_parameters(found.reference)) == len(gradients):
        hint = (
            f"Every gradient of the first batch is zero on one device as well, in all {len(gradients)} arrays, at a "
            f"loss of {found.reference.losses[0]:.6g}: training would change nothing. The loss does not depend on the "
            "parameters: look for a factor of zero, a stop_gradient, rounding, or an argmax between the two."
        )
        yield Difference(what=NO_GRADIENT, where="", relative=1.0, hint=hint)


def _of_first_batch(found: Found) -> Iterator[Difference]:
    measured, reference = found.measured, found.reference
    tolerance, worst = measured.tolerance, measured.gradients[0]
    weight = reference.weight or 1.0
    expected = Sums(
        reference.losses[0] * weight, reference.weight, jax.tree.map(lambda leaf: leaf * weight, reference.gradients)
    )
    if found.init.relative > measured.init_tolerance:
        hint = diagnosis.of_init(found.case(), found.init.path)
        yield Difference(what="initial parameters", where=found.init.path, relative=found.init.relative, hint=hint)
    if measured.loss_rel > tolerance:
        hint = diagnosis.of_loss(found.case(), found.sums, expected)
        what = "loss" if isfinite(reference.losses[0]) else NOT_FINITE
        yield Difference(what=what, where="", relative=measured.loss_rel, hint=hint)
    if measured.weight_rel > tolerance:
        hint = diagnosis.of_weight(found.sums.weight, reference.weight)
        yield Difference(what="weight", where="", relative=measured.weight_rel, hint=hint)
    if worst.relative > tolerance:
        hint = diagnosis.of_gradient(found.case(), worst.path, found.sums, expected, (found.norm, reference.norm))
        yield Difference(what="gradients", where=worst.path, relative=worst.relative, hint=hint)
    if measured.grad_norm_rel > tolerance:
        hint = diagnosis.of_norm(found.norm, reference.norm)
        yield Difference(what="gradient norm", where="", relative=measured.grad_norm_rel, hint=hint)


def _of_training(found: Found) -> Iterator[Difference]:
    """What the first batch does not show."""
    measured, bound = found.measured, found.measured.params_tolerance
    steps = counted(measured.steps, "step")
    changed = measured.params[0]
    if changed.relative > bound:
        hint = update_cause.of_parameters(changed.path, found.training, measured.losses, measured.reference_losses)
        yield Difference(what="parameters", where=changed.path, relative=changed.relative, hint=hint)
    for error, path, *_ in measured.optimizer[:1]:
        if error > bound:
            hint = (
                f"All parameters are right after {steps}. This array of the optimizer's state is not: it is what later "
                "updates begin with."
            )
            yield Difference(what="optimizer's state", where=path, relative=error, hint=hint)
    for error, path, *_ in measured.model_state[:1]:
        if error > bound:
            hint = (
                f"All parameters are right after {steps}. This array of the model's own state is not: "
                "the next state that the loss returns has to be that of the whole batch, with statistics summed over "
                "spmdkit.batch_axes(); else each device has its own, and their mean is kept."
            )
            yield Difference(what="the model's state", where=path, relative=error, hint=hint)
    error, what = measured.reported
    if error > bound:
        hint = f"All parameters are right after {steps}; the {what} is reported wrongly."
        yield Difference(what="what a step reports", where=what, relative=error, hint=hint)


def reported_error(reported: Sequence[StepMetrics], reference: Reference) -> tuple[float, str]:
    """The largest error of what the steps report, and of what.

    Args:
        reported: What each step reported.
        reference: The same steps on one device.
    """
    names = {"loss": reference.losses, "gradient norm": reference.norms, "weight": reference.weights}
    errors = []
    for number, metrics in enumerate(reported):
        values = (metrics.loss, metrics.grad_norm, metrics.weight)
        for (name, expected), value in zip(names.items(), values, strict=True):
            errors.append((relative(float(value), expected[number]), f"{name} of step {number}"))
        for name, value in reference.metrics[number].items() if reference.metrics else ():
            errors.append((relative(float(metrics.model[name]), value), f"metric {name!r} of step {number}"))
    return max(errors, key=lambda each: each[0])
