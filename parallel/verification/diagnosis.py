"""From a difference to its cause, by experiments that could have failed; without one, the measurement alone.

0. Contract. The model alone, on a few rows of one device: rows that depend on each other, random numbers that depend on
   which rows are together, a mean returned as the sum (`contract/breaches.py`). If it breaks, that is the cause.
1. Copies. Devices that should hold the same and do not: over which axes, and if their sum is the reference, a sum over
   these is missing.
2. Rows. The step runs with the weight of all rows but one at zero: which rows do not count, or count several times, and
   on which stages of a pipeline (`verification/row_counts.py`).

A factor, or the same numbers in other places, has many causes: these are measurements, and no cause is named.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..plan import ShardingPlan
from ..xla.error_texts import differing_result
from .differences import SMALL, copies, relative
from .reference import HostBatch, Sums
from .row_counts import MOST_ROWS, NEAR, Case, is_same, leaf_of, of_rows, of_stages


def of_init(case: Case, path: str) -> str:
    """Why an initial parameter differs."""
    leaf = leaf_of(case.params, path)
    value, expected = np.asarray(leaf, np.float64), leaf_of(case.one_device.init(str(leaf.dtype)), path)
    wrong = [row for row in range(len(value)) if not is_same(value[row], expected[row])] if value.ndim else []
    if 0 < len(wrong) < len(value):
        said = f"rows {', '.join(map(str, wrong[:MOST_ROWS]))} of the {len(value)} of dim 0 alone."
    else:
        said = f"in all of {path}: {how_it_differs(value, np.asarray(expected, np.float64))}"
    return f"The same seed draws other parameters on this mesh: {said}"


def of_loss(case: Case, found: Sums, reference: Sums) -> str:
    """Why the loss of a batch differs."""
    if not np.isfinite(reference.total):
        return f"It is {reference.total} on one device as well: the model itself, not the strategy."
    if case.contract:
        return case.contract
    rows = of_rows(case, None)
    if relative(found.weight, reference.weight) > SMALL:
        said = f"It is divided by a weight of {found.weight:.10g}, and one device by {reference.weight:.10g}"
        return f"{said}: {rows}" if rows else f"{said}."
    return rows or f"The weight is right; the sum of the losses is {_times(found.total, reference.total)}."


def _times(found: float, reference: float) -> str:
    return f"{digits(found / reference if reference else float('nan'))} times the reference"


def digits(ratio: float) -> str:
    """A ratio with the digits that tell it from 1, such as "0.98" or "1 + 3.0e-06"."""
    if abs(ratio - 1) < NEAR:
        return f"1 {'-' if ratio < 1 else '+'} {abs(ratio - 1):.1e}"
    return f"{ratio:.6g}"


def of_gradient(case: Case, path: str, found: Sums, reference: Sums, norms: tuple[float, float]) -> str:
    """Why a gradient differs where the loss does not; `norms` are the strategy's and that of one device."""
    if case.contract:
        return case.contract
    row = case.row(path)
    lacking = tuple(axis for axis in case.sizes if axis not in row.layout.used_axes)
    leaf, expected = leaf_of(found.gradients, path), _wide(leaf_of(reference.gradients, path))
    if said := _of_copies(case, leaf, expected, lacking):
        return f"{said} Its layout {row.layout} lacks {named(lacking)}: over these its gradient has to be summed, once."
    if alike := _of_all(found.gradients, reference.gradients):
        norm = "right" if relative(*norms) < abs(alike - 1) / 2 else f"{_times(*norms)} as well"
        return f"Every gradient is {digits(alike)} times the reference; the norm that the step reports is {norm}."
    value = _wide(leaf)
    said = of_stages(case, path, value, expected) or of_rows(case, path) or how_it_differs(value, expected)
    return f"{said[0].upper()}{said[1:]} Its layout is {row.layout}."


def _of_all(gradients: Any, reference: Any) -> float:
    """The factor that all gradients are off by, except for those that are rounding alone; 0 if there is none."""
    pairs = list(zip(map(_wide, jax.tree.leaves(gradients)), map(_wide, jax.tree.leaves(reference)), strict=True))
    sizes = [float(np.abs(expected).max(initial=0.0)) for _, expected in pairs]
    pairs = [pair for pair, size in zip(pairs, sizes, strict=True) if size > SMALL**2 * max(sizes)]
    ratio = factor(*max(pairs, key=lambda pair: float(np.abs(pair[1]).max(initial=0.0)))) if pairs else 0.0
    return ratio if ratio and all(is_multiple(*pair, ratio) for pair in pairs) else 0.0


def _wide(leaf: Any) -> np.ndarray:
    return np.asarray(leaf, np.float64)


def of_norm(found: float, reference: float) -> str:
    """The norm, if it differs while all gradients agree."""
    return f"It is {_times(found, reference)}, while every gradient is right."


def of_weight(found: float, reference: float) -> str:
    """The weight, if it differs while the mean loss does not."""
    said = f"It is {found:.10g}, and {reference:.10g} on one device: {_times(found, reference)}."
    return f"{said} The mean is right, the sums are not."


def of_evaluation(
    case: Case, found: tuple[float, float], reference: tuple[float, float], params: Any, batch: HostBatch
) -> str:
    """Why the sums (loss, weight) of an evaluation differ while those of training do not."""
    if case.contract:
        return case.contract
    said = [
        f"The {name} is {value:.10g}, and {expected:.10g} on one device: {_times(value, expected)}."
        for name, value, expected in zip(("sum of the losses", "weight"), found, reference, strict=True)
        if relative(value, expected) > case.tolerance
    ]
    with_key = case.one_device.sums(params, batch).total
    if relative(found[0], with_key) < SMALL < relative(found[0], reference[0]):
        said.append("The sum is that with the random numbers of step 0: an evaluation has none.")
    return " ".join(said)


def refused(error: Exception, layouts: ShardingPlan) -> tuple[str, str] | None:
    """What JAX's check of replication means, as (path, cause); None where the error is another one."""
    found = differing_result(error)
    if found is None:
        return None
    axes = [axis for axis in layouts.mesh.axis_names if axis in found.found and axis not in found.expected]
    return found.path, (
        f"JAX refuses the step: what it gives would differ between the devices along {named(axes)}, which have to "
        f"hold the same: a missing psum over {named(axes)}."
    )


def _of_copies(case: Case, leaf: Any, expected: np.ndarray, lacking: tuple[str, ...]) -> str:
    """Whether devices that should hold the same do not."""
    mesh = case.layouts.mesh
    names = tuple(mesh.axis_names)
    held = copies(leaf, names, mesh.shape, mesh.backend_mesh.devices.flat)
    size = max(np.abs(held).max(), 1e-300)
    differ = [axis for axis in lacking if np.ptp(held, axis=names.index(axis)).max() > NEAR * size]
    if not differ:
        return ""
    summed = held.sum(axis=tuple(names.index(axis) for axis in differ), keepdims=True)
    first = tuple(0 for _ in names)
    part = expected[leaf.sharding.devices_indices_map(leaf.shape)[mesh.backend_mesh.devices[first]]]
    if is_same(summed[first], part):
        return (
            f"Devices along {named(differ)} hold different values, and their sum is the reference: a missing psum "
            f"over {named(differ)}."
        )
    return f"Devices along {named(differ)} hold different values of what has to be the same."


def factor(value: np.ndarray, expected: np.ndarray) -> float:
    """The factor between two arrays that explains their difference; 0 if there is none."""
    ratio = float((value * expected).sum() / max((expected * expected).sum(), 1e-300))
    return ratio if is_multiple(value, expected, ratio) else 0.0


def is_multiple(value: np.ndarray, expected: np.ndarray, ratio: float) -> bool:
    """Tells whether a factor leaves no more than `NEAR` of the difference between two arrays."""
    left = np.abs(value - ratio * expected).max(initial=0.0)
    return bool(left <= NEAR * np.abs(value - expected).max(initial=0.0))


def how_it_differs(value: np.ndarray, expected: np.ndarray) -> str:
    """The measurement of an array that differs: a factor, the same numbers in other places, or the mean factor."""
    if ratio := factor(value, expected):
        return f"{digits(ratio)} times the reference in every element."
    ordered = (np.sort(each, axis=None) for each in (value, expected))
    if np.abs(np.subtract(*ordered)).max(initial=0.0) <= NEAR * np.abs(value - expected).max(initial=0.0):
        return "the same numbers in other places."
    ratio = float((value * expected).sum() / max((expected * expected).sum(), 1e-300))
    return f"no multiple of the reference; on average it is {digits(ratio)} times as large."


def named(axes: Sequence[str]) -> str:
    """Axes in words."""
    return " x ".join(axes) or "no axis"
