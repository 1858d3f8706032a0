"""From a difference to its usual cause, by measuring: copies, ratios, the order of elements, one row at a time.

0. Contract. The model alone, on a few rows of one device: rows that depend on each other, random numbers that depend on
   which rows are together, a mean returned as the sum (`contract/breaches.py`). Where it breaks, that is the cause.
1. Copies. Devices that should hold the same and do not: over which axes, and whether their sum is the reference.
2. Ratio. A gradient that is N or 1 / N times the reference everywhere: the axes whose sizes make N.
3. Order. The same numbers in other places: a parameter gathered or scattered along another dim, or in another order.
4. Rows. The step runs with the weight of all rows but one at zero: which rows count not at all, or several times, and
   on which stages of a pipeline (`verification/row_counts.py`).
5. Parameters. The step runs with one parameter set to a constant, which no wrong order can change: where the loss is
   right then, that parameter is the cause. Only parameters that are split come into question.

A hint says what was measured. Where none of this explains a difference, it gives the numbers alone.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import prod
from typing import Any

import jax
import numpy as np

from ..plan import ShardingPlan
from ..xla.error_texts import differing_result
from .differences import SMALL, copies, relative
from .reference import HostBatch, Sums
from .row_counts import MOST_ROWS, NEAR, Case, is_same, leaf_of, of_rows, of_stages

MOST_PARAMETERS = 200


def of_init(case: Case, path: str) -> str:
    """Why an initial parameter differs."""
    leaf = leaf_of(case.params, path)
    value, expected = np.asarray(leaf, np.float64), leaf_of(case.one_device.init(str(leaf.dtype)), path)
    said = of_order(value, np.asarray(expected, np.float64))
    wrong = [row for row in range(len(value)) if not is_same(value[row], expected[row])] if value.ndim else []
    if not said and 0 < len(wrong) < len(value):
        said = f"rows {', '.join(map(str, wrong[:MOST_ROWS]))} of the {len(value)} of dim 0 alone."
    return f"The same seed draws other parameters on this mesh: {said or f'in all of {path}.'}"


def of_loss(case: Case, found: Sums, reference: Sums) -> str:
    """Why the loss of a batch differs."""
    if not np.isfinite(reference.total):
        return f"It is {reference.total} on one device as well: the model itself, not the strategy."
    if case.contract:
        return case.contract
    weight = found.weight / reference.weight if reference.weight else float("nan")
    shards = case.layouts.num_batch_shards * case.microbatches
    if abs(weight - 1) > NEAR:
        said = f"It is divided by a weight of {found.weight:.6g}, and one device by {reference.weight:.6g}: "
        if shards > 1 and abs(found.weight - shards) < NEAR:
            return said + f"a mean of {shards} means, as when each share is divided by its own weight before the sum."
        times = f"{weight:.6g} times the reference."
        return said + (of_rows(case, None) or of_ratio(weight, case.sizes, ()) or times)
    return of_rows(case, None) or _of_parameters(case) or _totals(found, reference, case)


def of_gradient(case: Case, path: str, found: Sums, reference: Sums, norms: tuple[float, float]) -> str:
    """Why a gradient differs where the loss does not; `norms` are the strategy's and that of one device."""
    if case.contract:
        return case.contract
    alike = _of_all(found.gradients, reference.gradients)
    if alike and relative(*norms) < NEAR:
        return (
            f"Every gradient is {alike:.6g} times the reference, while the norm that the step reports is right: what "
            "they are multiplied by after it, for clipping and the weight, is wrong."
        )
    row = case.row(path)
    lacking = tuple(axis for axis in case.sizes if axis not in row.layout.used_axes)
    leaf, expected = leaf_of(found.gradients, path), np.asarray(leaf_of(reference.gradients, path), np.float64)
    whole = f" Its layout {row.layout} lacks {named(lacking)}: over these its gradient has to be summed, once."
    said = _of_copies(case, leaf, expected, lacking)
    if not said:
        value = np.asarray(leaf, np.float64)
        ratio = float((value * expected).sum() / max((expected * expected).sum(), 1e-300))
        uniform = is_same(value, ratio * expected) and bool(ratio)
        said = (
            (uniform and of_ratio(ratio, case.sizes, lacking))
            or of_order(value, expected)
            or of_stages(case, path, value, expected)
            or of_rows(case, path)
            or f"it is no multiple of the reference; on average it is {ratio:.4g} times as large."
        )
    return said[0].upper() + said[1:] + (whole if lacking else f" Its layout is {row.layout}.")


def _of_all(gradients: Any, reference: Any) -> float:
    """The factor that all gradients are off by; 0 where there is none."""
    pairs = list(zip(map(_wide, jax.tree.leaves(gradients)), map(_wide, jax.tree.leaves(reference)), strict=True))
    value, expected = max(pairs, key=lambda pair: float(np.abs(pair[1]).max(initial=0.0)))
    ratio = float((value * expected).sum() / max((expected * expected).sum(), 1e-300))
    return ratio if all(is_same(found, ratio * wanted) for found, wanted in pairs) else 0.0


def _wide(leaf: Any) -> np.ndarray:
    return np.asarray(leaf, np.float64)


def of_norm(case: Case, found: float, reference: float, gradients: Any) -> str:
    """Why the norm differs where all gradients agree."""
    squares: dict[tuple[str, ...], float] = {}
    for row, leaf in zip(case.layouts.update_table.rows, jax.tree.leaves(gradients), strict=True):
        axes = tuple(axis for axis in case.sizes if axis in row.layout.used_axes)
        squares[axes] = squares.get(axes, 0.0) + float(np.sum(np.square(leaf, dtype=np.float64)))
    excess = found**2 - reference**2
    for axes, square in squares.items():
        times = 1 + excess / square if square else 1.0
        split = f"gradients split over {named(axes)}" if axes else "gradients that every device holds whole"
        if abs(times - round(times)) < NEAR and round(times) > 1:
            return f"The squares of {split} are counted {round(times)} times."
        if axes and 0 <= times < 1 - NEAR:
            return f"Of the squares of {split} only a part is counted ({times:.4g} of them): a missing psum over them."
    return f"It is {found / reference:.6g} times the reference, while every gradient is right."


def of_weight(case: Case, found: float, reference: float) -> str:
    """Why the weight differs where the mean loss does not."""
    ratio = found / reference if reference else float("nan")
    return f"It is {found:.6g}, and {reference:.6g} on one device; the mean is right, the sums are not. " + of_ratio(
        ratio, case.sizes, ()
    )


def of_evaluation(
    case: Case, found: tuple[float, float], reference: tuple[float, float], params: Any, batch: HostBatch
) -> str:
    """Why the sums (loss, weight) of an evaluation differ where those of training do not."""
    if case.contract:
        return case.contract
    said = []
    for name, value, expected in zip(("sum of the losses", "weight"), found, reference, strict=True):
        if relative(value, expected) > SMALL:
            ratio = value / expected if expected else float("nan")
            said.append(f"The {name} is {value:.6g}, and {expected:.6g} on one device: {ratio:.6g} times as large.")
    with_key = case.one_device.sums(params, batch).total
    if relative(found[0], with_key) < SMALL < relative(found[0], reference[0]):
        said.append("The sum is that with the random numbers of step 0: an evaluation has none.")
    return " ".join(said) or f"{found} instead of {reference}, as (sum of the losses, weight)."


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
            f"devices along {named(differ)} hold different values, and their sum is the reference: a missing psum "
            f"over {named(differ)}."
        )
    return f"devices along {named(differ)} hold different values of what has to be the same."


def of_ratio(ratio: float, sizes: Mapping[str, int], lacking: Sequence[str]) -> str:
    """What a factor N or 1 / N means; axes that the layout lacks are the first suspects."""
    near = [axes for n in range(1, len(sizes) + 1) for axes in combinations(sizes, n)]
    near.sort(key=lambda axes: (not set(axes) <= set(lacking), len(axes)))
    for axes in near:
        size = prod(sizes[axis] for axis in axes)
        over = f"{named(axes)} ({'size' if len(axes) == 1 else 'sizes multiply to'} {size})"
        if abs(ratio / size - 1) < NEAR:
            return f"{size} times too large, as when summed twice over {over}."
        if abs(ratio * size - 1) < NEAR:
            return f"{size} times too small, as when averaged instead of summed, or a missing psum, over {over}."
    if abs(ratio - 1) < NEAR:
        return ""
    return f"{ratio:.6g} times the reference everywhere: a wrong weight or divisor."


def of_order(value: np.ndarray, expected: np.ndarray) -> str:
    """Whether an array has the same numbers in other places; "" where it has not."""
    if np.array_equal(value, expected) or not is_same(np.sort(value, axis=None), np.sort(expected, axis=None)):
        return ""
    return (
        "the same numbers in other places: gathered or scattered along the wrong dim, or with the shards in another "
        "order, than it is laid out in."
    )


def _of_parameters(case: Case) -> str:
    """The parameter whose order of elements makes the loss differ."""
    leaves, treedef = jax.tree.flatten(case.params)
    rows = case.layouts.table.rows
    suspects = [index for index in range(len(rows)) if rows[index].layout.used_axes][:MOST_PARAMETERS]
    for index in suspects:
        if leaves[index].size < 2:
            continue
        changed = list(leaves)
        level = float(np.sqrt(np.mean(np.square(np.asarray(leaves[index], np.float64))))) or 0.1
        constant = np.full(leaves[index].shape, level, leaves[index].dtype)
        changed[index] = jax.device_put(constant, leaves[index].sharding)
        params = jax.tree.unflatten(treedef, changed)
        found, reference = (run(params, case.batch) for run in (case.run, case.reference))
        if relative(found.total, reference.total) < SMALL:
            row = rows[index]
            return (
                f"With every element of {row.path} set to one number the losses agree: that parameter, laid out as "
                f"{row.layout}, is put together wrongly, along the wrong dim or with its shards in another order."
            )
    return ""


def _totals(found: Sums, reference: Sums, case: Case) -> str:
    ratio = found.total / reference.total if reference.total else float("nan")
    return f"The weight is right; the sum of the losses is {ratio:.6g} times the reference. " + (
        of_ratio(ratio, case.sizes, ()) or ""
    )


def named(axes: Sequence[str]) -> str:
    """Axes in words."""
    return " x ".join(axes) or "no axis"
