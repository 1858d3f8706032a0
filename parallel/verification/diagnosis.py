"""Explains a difference: measures it, and names a cause only after an experiment that could have failed.

1. Contract. The model alone is run on a few rows on one device. If it breaks the contract, that is the cause: rows that
   depend on each other, random numbers that depend on the other rows, or a mean returned as the sum
   (`contract/breaches.py`).
2. Copies. Devices that must hold equal values do not: the explanation names the axes. If the sum of the values is the
   reference, a sum over these axes is missing.

A factor, or the same numbers in other places, can have many causes: they are reported as measurements, without a cause.
"""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

import numpy as np

from ...layouts.paths import leaves_with_paths
from ..model import Params
from ..plan import ShardingPlan
from ..step.state import TrainState
from ..xla.error_texts import differing_result
from .case import Case
from .differences import GRADIENTS, MODEL_STATE, NEAR, OPTIMIZER, PARAMETERS, differing_copies, relative
from .light_batch import LIGHT_WEIGHT
from .reference import Reference, Sums
from .result import LIGHT_BATCH, NO_GRADIENT, NOT_FINITE, Difference, Verification


def first_difference(
    measured: Verification, reference: Reference, explain: Mapping[str, Callable[[str], str]]
) -> Difference | None:
    """Returns the first difference of the steps, in causal order; None if there is none."""
    loss = reference.reports[0]["loss"]
    if len(reference.frozen) == len(measured.gradients):
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


def explanations(
    case: Case, initial: Params, drawn: Params, found: Sums, norm: float, saved: TrainState, reference: Reference
) -> dict[str, Callable[[str], str]]:
    """Returns a function for each quantity of the steps that explains its difference, given its worst array.

    Args:
        case: The training.
        initial: The initial parameters on the mesh, blocks in the model's order.
        drawn: The initial parameters of one device.
        found: The strategy's sums of the first batch.
        norm: The strategy's gradient norm of the first batch.
        saved: The state after all steps on the mesh, blocks in the model's order.
        reference: The training on one device.
    """
    first, right = reference.first, "All parameters are correct after the steps"
    norm_text = describe_ratio(norm, reference.reports[0]["gradient norm"])

    def explain_change(path: str) -> str:
        before, after, expected = (_wide(leaf_of(tree, path)) for tree in (case.params, saved.params, reference.params))
        return (
            "The gradients of the first step and their norm are correct. The change of the parameter over all steps is "
            f"{describe_difference(after - before, expected - before)} `--steps 1` compares only the first update."
        )

    return {
        "initial parameters": lambda path: (
            "The same seed gives different parameters on this mesh: "
            + describe_difference(*(_wide(leaf_of(tree, path)) for tree in (initial, drawn)))
        ),
        "loss": lambda _: explain_loss(case, found, first),
        "weight": lambda _: f"{explain_sums(found, first, case.tolerance)} Their ratio, the mean loss, is correct.",
        GRADIENTS: lambda path: explain_gradient(case, path, found, first),
        "gradient norm": lambda _: f"It is {norm_text}, although every gradient is correct.",
        LIGHT_BATCH: lambda name: (
            f"The numbers of the batch itself are correct. If its weights are scaled to sum to {LIGHT_WEIGHT:g}, the "
            f"{name} is not: a divisor is not the weight of the batch."
        ),
        PARAMETERS: explain_change,
        OPTIMIZER: lambda _: f"{right}. This array, which later updates start from, is not.",
        MODEL_STATE: lambda _: (
            f"{right}. This array is not. The next state that the loss returns must be that of the whole batch, with "
            "statistics summed over spmdkit.batch_axes(). Otherwise each device has its own, and their mean is kept."
        ),
        "what a step reports": lambda name: f"{right}; the reported {name} is wrong.",
    }


def explain_sums(found: Sums, reference: Sums, tolerance: float) -> str:
    """Compares the sum of the losses and the weight with those of one device."""
    pairs = [("sum of the losses", found.total, reference.total), ("weight", found.weight, reference.weight)]
    return " ".join(
        f"The {name} is {value:.10g}, and {expected:.10g} on one device: {describe_ratio(value, expected)}."
        for name, value, expected in pairs
        if relative(value, expected) > tolerance
    )


def explain_loss(case: Case, found: Sums, reference: Sums) -> str:
    """Explains why the loss of a batch differs."""
    if not np.isfinite(reference.total):
        return f"It is {reference.total} on one device as well: the model itself, not the strategy."
    return case.contract.text or explain_sums(found, reference, case.tolerance)


def describe_ratio(found: float, reference: float) -> str:
    """Describes a number by its ratio to the reference: "0.98 times the reference", "1 + 3.0e-06 times the ..."."""
    ratio = found / reference if reference else float("nan")
    sign = "-" if ratio < 1 else "+"
    text = f"1 {sign} {abs(ratio - 1):.1e}" if abs(ratio - 1) < NEAR else f"{ratio:.6g}"
    return f"{text} times the reference"


def explain_gradient(case: Case, path: str, found: Sums, reference: Sums) -> str:
    """Explains why a gradient differs although the loss agrees."""
    if case.contract.text:
        return case.contract.text
    layout = case.layout(path)
    leaf, expected = leaf_of(found.gradients, path), _wide(leaf_of(reference.gradients, path))
    axes, adds_up = differing_copies(leaf, expected, layout)
    if axes:
        along = " x ".join(axes)
        cause = f"their sum is the reference: a missing psum over {along}" if adds_up else "they must be the same"
        return f"Devices along {along} hold different values, and {cause}. Its layout is {layout}."
    return f"It is {describe_difference(_wide(leaf), expected)} Its layout is {layout}."


def explain_rejection(error: Exception, plan: ShardingPlan) -> tuple[str, str] | None:
    """Explains an error of JAX's replication check as (path, cause); None for any other error."""
    found = differing_result(error)
    if found is None:
        return None
    path, axes = found
    along = " x ".join(axis for axis in plan.mesh.axis_names if axis in axes) or "no axis"
    return path, (
        f"JAX rejects the step, because its result would differ between the devices along {along}, which must hold "
        f"equal values: a missing psum over {along}."
    )


def describe_difference(value: np.ndarray, expected: np.ndarray) -> str:
    """Describes how an array differs: zero, a factor, or the same numbers in other places."""
    if not value.any():
        return "zero."
    ratio = float((value * expected).sum() / max((expected * expected).sum(), 1e-300))
    bound = NEAR * np.abs(value - expected).max(initial=0.0)
    if np.abs(value - ratio * expected).max(initial=0.0) <= bound:
        return f"{describe_ratio(ratio, 1.0)} in every element."
    if np.abs(np.sort(value, axis=None) - np.sort(expected, axis=None)).max(initial=0.0) <= bound:
        return "the same numbers in other places."
    return "not a multiple of the reference."


def _wide(leaf: Any) -> np.ndarray:
    return np.asarray(leaf, np.float64)


def leaf_of(tree: Any, path: str) -> Any:
    """Returns the leaf of a pytree at a path."""
    return dict(leaves_with_paths(tree))[path]
