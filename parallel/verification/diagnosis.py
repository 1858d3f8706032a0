"""Explains a difference: measures it, and names a cause only after an experiment that could have failed.

1. Contract. The model alone, on a few rows of one device: rows that depend on each other, random numbers that depend on
   which rows are together, a mean returned as the sum (`contract/breaches.py`). If it breaks, that is the cause.
2. Copies. Devices that must hold the same and do not: over which axes. If the sum of their values is the reference, a
   sum over these axes is missing.
3. Rows. The step runs with the weight of all rows but one at zero: which rows do not count, or count several times.
4. Random numbers. One device repeats an evaluation, or a later step, with the random numbers of step 0.
5. Updates. If the first gradients agree and the parameters after some steps do not, single steps are repeated from the
   strategy's own parameters: one device gets another loss from them, or another update.

A factor, or the same numbers in other places, has many causes: these are measurements, and no cause is named.
"""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

import jax
import numpy as np

from ...layouts.paths import leaves_with_paths
from ..model import Params
from ..plan import ShardingPlan
from ..xla.error_texts import differing_result
from .case import Case
from .differences import (
    GRADIENTS,
    MODEL_STATE,
    NEAR,
    OPTIMIZER,
    PARAMETERS,
    SMALL,
    differing_copies,
    is_same,
    leaf_errors,
    relative,
    state_errors,
)
from .reference import HostBatch, Reference, Sums
from .result import NO_GRADIENT, NOT_FINITE, Difference, Verification

WEIGHTS = "weights"
MAX_ROWS = 64


def first_difference(
    measured: Verification, reference: Reference, explain: Mapping[str, Callable[[str], str]]
) -> Difference | None:
    """Returns the first difference of the steps, in causal order; None if there is none."""
    loss = reference.losses[0]
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
    case: Case, initial: Params, drawn: Params, found: Sums, norm: float, reference: Reference
) -> dict[str, Callable[[str], str]]:
    """Returns a function for each quantity of the steps that explains its difference, given its worst array.

    Args:
        case: The training.
        initial: The initial parameters on the mesh, blocks in the model's order.
        drawn: The initial parameters of one device.
        found: The strategy's sums of the first batch.
        norm: The strategy's gradient norm of the first batch.
        reference: The training on one device.
    """
    first, norms = reference.first, (norm, reference.norms[0])
    right = "All parameters are right after the steps"
    return {
        "initial parameters": lambda path: (
            "The same seed gives other parameters on this mesh: "
            + how_it_differs(*(_wide(leaf_of(tree, path)) for tree in (initial, drawn)))
        ),
        "loss": lambda _: explain_loss(case, found, first),
        "weight": lambda _: f"{explain_sums(found, first, case.tolerance)} Their ratio, the mean loss, is right.",
        GRADIENTS: lambda path: explain_gradient(case, path, found, first, norms),
        "gradient norm": lambda _: f"It is {times_reference(*norms)}, while every gradient is right.",
        PARAMETERS: lambda path: explain_parameters(case, path),
        OPTIMIZER: lambda _: f"{right}. This array is not: it is what later updates begin with.",
        MODEL_STATE: lambda _: (
            f"{right}. This array is not: the next state that the loss returns must be that "
            "of the whole batch, with statistics summed over spmdkit.batch_axes(); else each device has its own, and "
            "their mean is kept."
        ),
        "what a step reports": lambda name: f"{right}; the {name} is reported wrongly.",
    }


def explain_sums(found: Sums, reference: Sums, tolerance: float) -> str:
    """Compares the sum of the losses and the weight with those of one device."""
    pairs = [("sum of the losses", found.total, reference.total), ("weight", found.weight, reference.weight)]
    return " ".join(
        f"The {name} is {value:.10g}, and {expected:.10g} on one device: {times_reference(value, expected)}."
        for name, value, expected in pairs
        if relative(value, expected) > tolerance
    )


def explain_loss(case: Case, found: Sums, reference: Sums) -> str:
    """Explains why the loss of a batch differs."""
    if not np.isfinite(reference.total):
        return f"It is {reference.total} on one device as well: the model itself, not the strategy."
    return case.contract or " ".join(filter(None, (explain_sums(found, reference, SMALL), miscounted_rows(case))))


def times_reference(found: float, reference: float) -> str:
    """Describes a number by its ratio to the reference."""
    return f"{format_ratio(found / reference if reference else float('nan'))} times the reference"


def format_ratio(ratio: float) -> str:
    """Formats a ratio with enough digits to distinguish it from 1, such as "0.98" or "1 + 3.0e-06"."""
    if abs(ratio - 1) < NEAR:
        return f"1 {'-' if ratio < 1 else '+'} {abs(ratio - 1):.1e}"
    return f"{ratio:.6g}"


def explain_gradient(case: Case, path: str, found: Sums, reference: Sums, norms: tuple[float, float]) -> str:
    """Explains why a gradient differs although the loss agrees; `norms` are the strategy's and one device's."""
    if case.contract:
        return case.contract
    layout = case.layout(path)
    leaf, expected = leaf_of(found.gradients, path), _wide(leaf_of(reference.gradients, path))
    axes, adds_up = differing_copies(leaf, expected, layout)
    if axes:
        along = " x ".join(axes)
        cause = f"their sum is the reference: a missing psum over {along}" if adds_up else "they must be the same"
        return f"Devices along {along} hold different values, and {cause}. Its layout is {layout}."
    if ratio := common_factor(found.gradients, reference.gradients):
        norm = "right" if relative(*norms) < abs(ratio - 1) / 2 else f"{times_reference(*norms)} as well"
        return f"Every gradient is {format_ratio(ratio)} times the reference; the norm that the step reports is {norm}."
    text = miscounted_rows(case, path) or f"It is {how_it_differs(_wide(leaf), expected)}"
    return f"{text} Its layout is {layout}."


def common_factor(gradients: Any, reference: Any) -> float:
    """Returns the common factor of all gradients that exceed rounding; 0 if there is none."""
    pairs = [tuple(map(_wide, pair)) for pair in zip(*map(jax.tree.leaves, (gradients, reference)), strict=True)]
    largest = max(np.abs(expected).max(initial=0.0) for _, expected in pairs)
    pairs = [(value, expected) for value, expected in pairs if np.abs(expected).max(initial=0.0) > SMALL**2 * largest]
    ratio = factor(*pairs[0]) if pairs else 0.0
    return ratio if ratio and all(is_multiple(*pair, ratio) for pair in pairs) else 0.0


def explain_evaluation(case: Case, params: Params, batch: HostBatch, found: Sums, reference: Sums) -> str:
    """Explains why the sums of an evaluation differ although those of training agree."""
    if case.contract:
        return case.contract
    text = explain_sums(found, reference, case.tolerance)
    if not text:
        return "The sum of the losses and the weight are right; those of this metric are not."
    with_key = case.one_device.sums(params, batch).total
    if relative(found.total, with_key) < SMALL < relative(found.total, reference.total):
        text += " The sum is that with the random numbers of step 0: an evaluation has none."
    return text


def refused(error: Exception, plan: ShardingPlan) -> tuple[str, str] | None:
    """Explains an error of JAX's replication check as (path, cause); None for any other error."""
    found = differing_result(error)
    if found is None:
        return None
    axes = [axis for axis in plan.mesh.axis_names if axis in found.found and axis not in found.expected]
    along = " x ".join(axes) or "no axis"
    return found.path, (
        f"JAX refuses the step: its result would differ between the devices along {along}, which must hold the same: a "
        f"missing psum over {along}."
    )


def miscounted_rows(case: Case, path: str | None = None) -> str:
    """Describes the rows that do not count exactly once, in the loss (path None) or in one gradient.

    Returns:
        "Rows 2, 3 of 8 are not counted.", or "" if no such rows explain the difference.
    """
    batch, state = case.batches[0], case.first_state()
    if WEIGHTS not in batch or len(batch[WEIGHTS]) > MAX_ROWS:
        return ""
    counts: dict[int, float] = {}
    for index in range(len(batch[WEIGHTS])):
        weights = np.zeros_like(batch[WEIGHTS])
        weights[index] = 1
        alone = {**batch, WEIGHTS: weights}
        found, reference = case.sums(state, alone)[0], case.one_device.sums(case.params, alone)
        if path is None:
            counts[index] = found.total / reference.total if reference.total else 1.0
            continue
        value, expected = (_wide(leaf_of(each.gradients, path)) for each in (found, reference))
        counts[index] = float((value * expected).sum() / max((expected * expected).sum(), 1e-300))
        if not is_same(value, counts[index] * expected):
            return ""
    wrong = [index for index, count in counts.items() if not abs(count - 1) < NEAR]
    if len(wrong) in (0, len(counts)):  # a factor of all rows has other causes
        return ""
    times = np.round(counts[wrong[0]])
    if not all(abs(counts[index] - times) <= NEAR for index in wrong):
        return ""
    how = f"count {int(times)} times" if times else "are not counted"
    return f"Rows {', '.join(map(str, wrong))} of {len(counts)} {how}."


def factor(value: np.ndarray, expected: np.ndarray) -> float:
    """Returns the factor that explains the difference of two arrays; 0 if there is none."""
    ratio = float((value * expected).sum() / max((expected * expected).sum(), 1e-300))
    return ratio if is_multiple(value, expected, ratio) else 0.0


def is_multiple(value: np.ndarray, expected: np.ndarray, ratio: float) -> bool:
    """Checks if a factor explains the difference between two arrays up to `NEAR`."""
    left = np.abs(value - ratio * expected).max(initial=0.0)
    return bool(left <= NEAR * np.abs(value - expected).max(initial=0.0))


def how_it_differs(value: np.ndarray, expected: np.ndarray) -> str:
    """Describes how an array differs: zero, a factor, or the same numbers in other places."""
    if not value.any():
        return "zero."
    if ratio := factor(value, expected):
        return f"{format_ratio(ratio)} times the reference in every element."
    ordered = (np.sort(each, axis=None) for each in (value, expected))
    if np.abs(np.subtract(*ordered)).max(initial=0.0) <= NEAR * np.abs(value - expected).max(initial=0.0):
        return "the same numbers in other places."
    return "no multiple of the reference."


def explain_parameters(case: Case, path: str) -> str:
    """Explains why a parameter differs after all steps: repeats each step from the strategy's own parameters."""
    known = "The gradients of the first step and their norm are right"
    state, opt_state = case.first_state(), case.one_device.first_state(case.params)
    for number, batch in enumerate(case.batches):
        before, model_state = jax.device_get((case.in_model_order(state.params), state.model_state))
        sums = case.one_device.sums(before, batch, number, model_state)
        state, metrics = case.step(state, dict(batch))
        found, expected = float(metrics.loss), sums.total / (sums.weight or 1)
        if relative(found, expected) > case.tolerance:
            return f"{known}. {_explain_later_loss(case, before, number, found, expected)}"
        params, opt_state = case.one_device.update(before, opt_state, sums)
        saved = case.in_model_order(state)
        if leaf_errors(saved.params, params, tolerance=case.tolerance)[0].relative > case.params_tolerance:
            old, new, right = (_wide(leaf_of(tree, path)) for tree in (before, saved.params, params))
            change = how_it_differs(new - old, right - old)
            text = f"{known}, so it is the update of step {number}: the change of {path} is {change}"
            off = state_errors(saved.opt_state, opt_state, params, tolerance=case.tolerance)[:1]
            if off and off[0].relative > case.params_tolerance:
                text += f" Of the optimizer's state, {off[0].path} is off by {off[0].relative:.1e}."
            return text
    return f"{known}; each update alone is that of one device."


def _explain_later_loss(case: Case, params: Params, number: int, found: float, expected: float) -> str:
    """Explains why the loss of a later step differs from one device with the same parameters."""
    text = f"At the same parameters, the loss of step {number} is {found:.8g}, and {expected:.8g} on one device."
    sums = case.one_device.sums(params, case.batches[number], 0)
    if number and relative(found, sums.total / (sums.weight or 1)) <= case.tolerance:
        return f"{text} It is that with the random numbers of step 0: the step is not folded into the key."
    return text


def _wide(leaf: Any) -> np.ndarray:
    return np.asarray(leaf, np.float64)


def leaf_of(tree: Any, path: str) -> Any:
    """Returns the leaf of a pytree at a path."""
    return dict(leaves_with_paths(tree))[path]
