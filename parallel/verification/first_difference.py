"""Finds the first difference between training and one device, in causal order, and its cause."""

from collections.abc import Callable, Iterator, Sequence
from math import isfinite

import jax

from ...layouts.sizes import counted
from ..step.state import StepMetrics
from . import diagnosis
from .claims import frozen_parameters
from .diagnosis import Training
from .differences import LeafError, relative
from .reference import Reference, Sums
from .result import NO_GRADIENT, NOT_FINITE, Difference, Verification
from .row_counts import Case


def differences(
    measured: Verification,
    init: LeafError,
    found: Sums,
    norm: float,
    reference: Reference,
    case: Callable[[], Case],
    training: Training,
) -> Iterator[Difference]:
    """Yields the differences in causal order; finding the cause of one takes time, so take only the first.

    Args:
        measured: The errors.
        init: The worst of the initial parameters.
        found: The strategy's sums of the first batch.
        norm: The strategy's norm of the first batch.
        reference: The training on one device.
        case: Creates the data for finding a cause.
        training: The steps, to be repeated.
    """
    bound, worst, (loss, weight) = (
        measured.tolerance,
        measured.gradients[0],
        (reference.losses[0], reference.weights[0]),
    )
    if len(frozen_parameters(reference)) == len(measured.gradients):
        hint = (
            f"Every gradient of the first batch is zero on one device as well, in all {len(measured.gradients)} "
            f"arrays, at a loss of {loss:.6g}: training would change nothing. The loss does not depend on the "
            "parameters: look for a factor of zero, a stop_gradient, rounding, or an argmax between the two."
        )
        yield _difference(NO_GRADIENT, 1.0, hint)
    if init.relative > measured.init_tolerance:
        yield _difference("initial parameters", init.relative, diagnosis.explain_init(case(), init.path), init.path)
    gradients = jax.tree.map(lambda leaf: leaf * (weight or 1.0), reference.gradients)
    expected = Sums(loss * (weight or 1.0), weight, gradients)
    if measured.loss_rel > bound:
        hint = diagnosis.explain_loss(case(), found, expected)
        yield _difference("loss" if isfinite(loss) else NOT_FINITE, measured.loss_rel, hint)
    if measured.weight_rel > bound:
        times = diagnosis.times_reference(found.weight, weight)
        hint = (
            f"It is {found.weight:.10g}, and {weight:.10g} on one device: {times}. The mean is right, the sums are not."
        )
        yield _difference("weight", measured.weight_rel, hint)
    norms = norm, reference.norms[0]
    if worst.relative > bound:
        hint = diagnosis.explain_gradient(case(), worst.path, found, expected, norms)
        yield _difference("gradients", worst.relative, hint, worst.path)
    if measured.grad_norm_rel > bound:
        hint = f"It is {diagnosis.times_reference(*norms)}, while every gradient is right."
        yield _difference("gradient norm", measured.grad_norm_rel, hint)
    yield from _after_steps(measured, training)


def _after_steps(measured: Verification, training: Training) -> Iterator[Difference]:
    """Yields the differences after all steps."""
    bound, changed = measured.params_tolerance, measured.params[0]
    if changed.relative > bound:
        losses = measured.losses, measured.reference_losses
        hint = diagnosis.explain_parameters(changed.path, training, *losses)
        yield _difference("parameters", changed.relative, hint, changed.path)
    right = f"All parameters are right after {counted(measured.steps, 'step')}"
    for error in measured.optimizer[:1]:
        if error.relative > bound:
            hint = f"{right}. This array of the optimizer's state is not: it is what later updates begin with."
            yield _difference("optimizer's state", error.relative, hint, error.path)
    for error in measured.model_state[:1]:
        if error.relative > bound:
            hint = (
                f"{right}. This array of the model's own state is not: the next state that the loss returns must be "
                "that of the whole batch, with statistics summed over spmdkit.batch_axes(); else each device has its "
                "own, and their mean is kept."
            )
            yield _difference("the model's state", error.relative, hint, error.path)
    error, name = measured.reported
    if error > bound:
        yield _difference("what a step reports", error, f"{right}; the {name} is reported wrongly.", name)
    if unexpected := measured.collectives.unexpected:
        hint = f"The numbers are right, but the collectives differ from the predictions: {'; '.join(unexpected)}."
        yield _difference("collectives", float(len(unexpected)), hint)


def _difference(what: str, relative: float, hint: str, where: str = "") -> Difference:
    return Difference(what=what, where=where, relative=relative, hint=hint)


def reported_error(reported: Sequence[StepMetrics], reference: Reference) -> tuple[float, str]:
    """Returns the largest error of the reported metrics, and the name of the metric.

    Args:
        reported: The metrics of each step.
        reference: The steps on one device.
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
