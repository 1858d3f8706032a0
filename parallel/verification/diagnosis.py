"""Finds the cause of a difference by experiments that could have failed; otherwise, returns the measurement.

0. Contract. The model alone, on a few rows of one device: rows that depend on each other, random numbers that depend on
   which rows are together, a mean returned as the sum (`contract/breaches.py`). If it breaks, that is the cause.
1. Copies. Devices that should hold the same and do not: over which axes, and if their sum is the reference, a sum over
   these is missing.
2. Rows. The step runs with the weight of all rows but one at zero: which rows do not count, or count several times, and
   on which stages of a pipeline (`row_counts.py`).
3. Updates. If the first gradients agree and the parameters after some steps do not, single steps are repeated from the
   strategy's own parameters: one device gets another loss from them, or another update.

A factor, or the same numbers in other places, has many causes: these are measurements, and no cause is named.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..plan import ShardingPlan
from ..sharding.stored_order import stored_order
from ..step.train_step import Step
from ..xla.error_texts import differing_result
from .differences import SMALL, copies, leaf_errors, relative, state_errors
from .reference import HostBatch, OneDevice, Sums
from .row_counts import NEAR, Case, is_same, leaf_of, of_rows, of_stages


def explain_init(case: Case, path: str) -> str:
    """Explains why an initial parameter differs."""
    leaf = leaf_of(case.params, path)
    value, expected = _wide(leaf), _wide(leaf_of(case.one_device.init(str(leaf.dtype)), path))
    return f"The same seed draws other parameters on this mesh: {how_it_differs(value, expected)}"


def explain_loss(case: Case, found: Sums, reference: Sums) -> str:
    """Explains why the loss of a batch differs."""
    if not np.isfinite(reference.total):
        return f"It is {reference.total} on one device as well: the model itself, not the strategy."
    if case.contract:
        return case.contract
    rows = of_rows(case, None)
    if relative(found.weight, reference.weight) > SMALL:
        said = f"It is divided by a weight of {found.weight:.10g}, and one device by {reference.weight:.10g}"
        return f"{said}: {rows}" if rows else f"{said}."
    return rows or f"The weight is right; the sum of the losses is {times_reference(found.total, reference.total)}."


def _wide(leaf: Any) -> np.ndarray:
    return np.asarray(leaf, np.float64)


def times_reference(found: float, reference: float) -> str:
    """Describes a number by its ratio to the reference."""
    return f"{digits(found / reference if reference else float('nan'))} times the reference"


def digits(ratio: float) -> str:
    """Formats a ratio with enough digits to distinguish it from 1, such as "0.98" or "1 + 3.0e-06"."""
    if abs(ratio - 1) < NEAR:
        return f"1 {'-' if ratio < 1 else '+'} {abs(ratio - 1):.1e}"
    return f"{ratio:.6g}"


def explain_gradient(case: Case, path: str, found: Sums, reference: Sums, norms: tuple[float, float]) -> str:
    """Explains why a gradient differs although the loss agrees; `norms` are the strategy's and one device's."""
    if case.contract:
        return case.contract
    row = case.row(path)
    lacking = tuple(axis for axis in case.sizes if axis not in row.layout.used_axes)
    leaf, expected = leaf_of(found.gradients, path), _wide(leaf_of(reference.gradients, path))
    if said := _of_copies(case, leaf, expected, lacking):
        return f"{said} Its layout {row.layout} lacks {named(lacking)}: over these its gradient must be summed, once."
    if alike := _of_all(found.gradients, reference.gradients):
        norm = "right" if relative(*norms) < abs(alike - 1) / 2 else f"{times_reference(*norms)} as well"
        return f"Every gradient is {digits(alike)} times the reference; the norm that the step reports is {norm}."
    value = _wide(leaf)
    said = of_stages(case, path, value, expected) or of_rows(case, path) or how_it_differs(value, expected)
    return f"{said[0].upper()}{said[1:]} Its layout is {row.layout}."


def _of_all(gradients: Any, reference: Any) -> float:
    """Returns the common factor of all gradients that exceed rounding; 0 if there is none."""
    pairs = [tuple(map(_wide, pair)) for pair in zip(*map(jax.tree.leaves, (gradients, reference)), strict=True)]
    largest = max(np.abs(expected).max(initial=0.0) for _, expected in pairs)
    pairs = [(value, expected) for value, expected in pairs if np.abs(expected).max(initial=0.0) > SMALL**2 * largest]
    ratio = factor(*pairs[0]) if pairs else 0.0
    return ratio if ratio and all(is_multiple(*pair, ratio) for pair in pairs) else 0.0


def explain_evaluation(
    case: Case, found: tuple[float, float], reference: tuple[float, float], params: Any, batch: HostBatch
) -> str:
    """Explains why the sums (loss, weight) of an evaluation differ although those of training agree."""
    if case.contract:
        return case.contract
    said = [
        f"The {name} is {value:.10g}, and {expected:.10g} on one device: {times_reference(value, expected)}."
        for name, value, expected in zip(("sum of the losses", "weight"), found, reference, strict=True)
        if relative(value, expected) > case.tolerance
    ]
    with_key = case.one_device.sums(params, batch).total
    if relative(found[0], with_key) < SMALL < relative(found[0], reference[0]):
        said.append("The sum is that with the random numbers of step 0: an evaluation has none.")
    return " ".join(said)


def refused(error: Exception, layouts: ShardingPlan) -> tuple[str, str] | None:
    """Explains an error of JAX's replication check as (path, cause); None for any other error."""
    found = differing_result(error)
    if found is None:
        return None
    axes = [axis for axis in layouts.mesh.axis_names if axis in found.found and axis not in found.expected]
    return found.path, (
        f"JAX refuses the step: its result would differ between the devices along {named(axes)}, which must "
        f"hold the same: a missing psum over {named(axes)}."
    )


def _of_copies(case: Case, leaf: Any, expected: np.ndarray, lacking: tuple[str, ...]) -> str:
    """Describes replicas that differ; "" if they agree."""
    mesh = case.layouts.mesh
    names = tuple(mesh.axis_names)
    held = copies(leaf, mesh.shape, mesh.backend_mesh.devices.flat)
    bound = NEAR * max(np.abs(held).max(), 1e-300)
    differ = [axis for axis in lacking if np.ptp(held, axis=names.index(axis)).max() > bound]
    if not differ:
        return ""
    summed = held.sum(axis=tuple(names.index(axis) for axis in differ), keepdims=True)
    first = tuple(0 for _ in names)
    part = expected[leaf.sharding.devices_indices_map(leaf.shape)[mesh.backend_mesh.devices[first]]]
    if is_same(summed[first], part):
        along = named(differ)
        return (
            f"Devices along {along} hold different values, and their sum is the reference: a missing psum over {along}."
        )
    return f"Devices along {named(differ)} hold different values of what must be the same."


def factor(value: np.ndarray, expected: np.ndarray) -> float:
    """Returns the factor that explains the difference of two arrays; 0 if there is none."""
    ratio = float((value * expected).sum() / max((expected * expected).sum(), 1e-300))
    return ratio if is_multiple(value, expected, ratio) else 0.0


def is_multiple(value: np.ndarray, expected: np.ndarray, ratio: float) -> bool:
    """Checks if a factor explains the difference between two arrays up to `NEAR`."""
    left = np.abs(value - ratio * expected).max(initial=0.0)
    return bool(left <= NEAR * np.abs(value - expected).max(initial=0.0))


def how_it_differs(value: np.ndarray, expected: np.ndarray) -> str:
    """Describes how an array differs: a factor, the same numbers in other places, or the mean factor."""
    if ratio := factor(value, expected):
        return f"{digits(ratio)} times the reference in every element."
    ordered = (np.sort(each, axis=None) for each in (value, expected))
    if np.abs(np.subtract(*ordered)).max(initial=0.0) <= NEAR * np.abs(value - expected).max(initial=0.0):
        return "the same numbers in other places."
    return "no multiple of the reference."


def named(axes: Sequence[str]) -> str:
    """Formats axes, such as "data x fsdp"."""
    return " x ".join(axes) or "no axis"


class Training(NamedTuple):
    """The data for repeating the steps of a training.

    Attributes:
        step: The step of the strategy.
        one_device: The one device.
        batches: One batch for each step.
        seed: The run's seed.
        tolerance: The tolerance of a loss.
        params_tolerance: The tolerance of parameters.
    """

    step: Step
    one_device: OneDevice
    batches: Sequence[HostBatch]
    seed: int
    tolerance: float
    params_tolerance: float


def explain_parameters(path: str, training: Training, losses: Sequence[float], reference: Sequence[float]) -> str:
    """Explains why a parameter differs after all steps.

    Args:
        path: The parameter's path.
        training: The steps.
        losses: The strategy's losses.
        reference: The losses of one device.
    """
    late = [n for n, pair in enumerate(zip(losses, reference, strict=True)) if relative(*pair) > training.tolerance]
    when = f"the losses agree until step {late[0]}" if late else "the losses of all steps agree"
    said = f"The gradients of the first step and their norm are right, and {when}"
    step, one_device = training.step, training.one_device
    state = step.init(training.seed)
    opt_state = one_device.first_state(one_device.to_model(jax.tree.map(np.asarray, state.params)))
    for number, batch in enumerate(training.batches):
        before, model_state = (jax.tree.map(np.asarray, each) for each in (state.params, state.model_state))
        params = one_device.to_model(before)
        sums = one_device.sums_in_order(params, batch, number, model_state)
        state, metrics = step(state, dict(batch))
        found, expected = float(metrics.loss), sums.total / (sums.weight or 1)
        if relative(found, expected) > training.tolerance:
            return f"{said}: {_of_loss(training, params, number, found, expected)}"
        params, opt_state = one_device.update(params, opt_state, sums)
        saved = stored_order(step.plan).to_model(state)
        if leaf_errors(saved.params, params, tolerance=training.tolerance)[0].relative > training.params_tolerance:
            off = state_errors(saved.opt_state, opt_state, params, tolerance=training.tolerance)[:1]
            arrays = (_wide(leaf_of(tree, path)) for tree in (one_device.to_model(before), saved.params, params))
            said = f"{said}, so it is the update: {_of_update(path, *arrays)}"
            if off and off[0].relative > training.params_tolerance:
                said += f" Of the optimizer's state, {off[0].path} is off by {off[0].relative:.1e}."
            return said
    return f"{said}; each update alone is that of one device."


def _of_loss(training: Training, params: Any, number: int, found: float, expected: float) -> str:
    """Explains why the loss of a later step differs from one device with the same parameters."""
    said = f"at the same parameters, the loss of step {number} is {found:.8g}, and {expected:.8g} on one device."
    for other in range(number):
        sums: Sums = training.one_device.sums_in_order(params, training.batches[number], other)
        if relative(found, sums.total / (sums.weight or 1)) <= training.tolerance:
            return f"{said} It is that with the random numbers of step {other}: the step is not folded into the key."
    return said


def _of_update(path: str, before: np.ndarray, found: np.ndarray, expected: np.ndarray) -> str:
    """Describes the actual and the expected change of a parameter in one step."""
    moved, wanted, extra = found - before, expected - before, found - expected
    if not moved.any():
        return f"{path} does not move."
    if is_same(found, expected):
        return f"{path} is right after the first update that is wrong."
    own = float((extra * before).sum() / max((before * before).sum(), 1e-300))
    if is_same(own * before, extra) and not factor(moved, wanted):
        return f"{path} has {own:+.4g} times itself added, beyond the update of one device."
    return f"its change is {how_it_differs(moved, wanted)}"
