"""Finds rows of a batch that do not count exactly once, by setting the weight of all other rows to zero."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax
import numpy as np

from ...layouts.paths import leaves_with_paths
from ...layouts.table import LayoutRow
from .. import pipeline
from ..plan import ShardingPlan
from .contract.breaches import breaches
from .reference import HostBatch, OneDevice, Sums

WEIGHTS = "weights"
MAX_ROWS = 64
NEAR = 1e-4
"""The tolerance for treating a measured ratio as a given number."""


@dataclass(frozen=True)
class Case:
    """The data for finding the cause of a difference.

    Attributes:
        layouts: The strategy's plan.
        microbatches: The number of microbatches of a device, over all accumulation.
        run: (params, batch) -> the strategy's sums; params and gradients are arrays on the mesh.
        params: The parameters, on the mesh.
        one_device: The one device.
        batch: The global batch.
        tolerance: The largest relative error of a loss.
    """

    layouts: ShardingPlan
    microbatches: int
    run: Callable[[Any, HostBatch], Sums]
    params: Any
    one_device: OneDevice
    batch: HostBatch
    tolerance: float = 1e-9

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis -> size, of those over 1."""
        mesh = self.layouts.mesh
        return {axis: mesh.axis_size(axis) for axis in mesh.axis_names if mesh.axis_size(axis) > 1}

    def row(self, path: str) -> LayoutRow:
        """Returns the layout of the gradient and the update of one parameter."""
        return next(row for row in self.layouts.update_table.rows if row.path == path)

    @cached_property
    def contract(self) -> str:
        """Describes the breaches of the contract on one device, for any strategy; "" if there are none."""
        params = self.one_device.to_model(jax.tree.map(np.asarray, self.params))
        try:
            found = breaches(self.one_device.model, params, self.batch, self.one_device.key(0))
        except Exception:  # the model may not accept so few rows
            return ""
        said = " Besides, ".join(breach.message for breach in found)
        return f"The model, not the strategy: on one device as well, {said}" if found else ""

    def reference(self, params: Any, batch: HostBatch) -> Sums:
        """Returns the sums of one device."""
        return self.one_device.sums(jax.tree.map(np.asarray, params), batch)


def of_rows(case: Case, path: str | None, blocks: slice = slice(None)) -> str:
    """Describes the rows that do not count exactly once, in the loss (path None) or in one gradient.

    Args:
        case: The data.
        path: The parameter's path.
        blocks: The part of dim 0 of its gradient that is compared.

    Returns:
        "microbatch 2 of the 4 of every device (rows 2, 3 of 8) is not counted.", or "" if no such rows explain it.
    """
    if WEIGHTS not in case.batch or len(case.batch[WEIGHTS]) > MAX_ROWS:
        return ""
    counts: dict[int, float] = {}
    for index in range(len(case.batch[WEIGHTS])):
        found, reference = (run(case.params, _only(case.batch, index)) for run in (case.run, case.reference))
        if path is None:
            counts[index] = found.total / reference.total if reference.total else 1.0
            continue
        value, expected = (np.asarray(leaf_of(each.gradients, path), np.float64)[blocks] for each in (found, reference))
        counts[index] = float((value * expected).sum() / max((expected * expected).sum(), 1e-300))
        if not is_same(value, counts[index] * expected):
            return ""
    wrong = [index for index, count in counts.items() if not abs(count - 1) < NEAR]
    if len(wrong) in (0, len(counts)):  # a factor of all rows has other causes
        return ""
    times = np.round(counts[wrong[0]])
    if not all(abs(counts[index] - times) <= NEAR for index in wrong):
        return ""
    how = f"counts {int(times)} times" if times else "is not counted"
    return f"{_rows(wrong, case)} {how}."


def _rows(rows: Sequence[int], case: Case) -> str:
    """Names a set of rows by what they have in common: a microbatch, or coordinates along a batch axis."""
    count = len(case.batch[WEIGHTS])
    per_shard = count // case.layouts.num_batch_shards
    per_microbatch = max(1, per_shard // case.microbatches)
    places = sorted({row % per_shard for row in rows})
    text = f"{'row' if len(rows) == 1 else 'rows'} {', '.join(map(str, rows))} of {count}"
    microbatches = sorted({place // per_microbatch for place in places})
    complete = len(rows) == len(places) * case.layouts.num_batch_shards
    if case.microbatches > 1 and complete and len(places) == len(microbatches) * per_microbatch < per_shard:
        which = ", ".join(str(each + 1) for each in microbatches)
        return f"microbatch {which} of the {case.microbatches} of every device ({text})"
    axes = case.layouts.batch_axes
    sizes = [case.sizes[axis] for axis in axes]
    coordinates = np.stack(np.unravel_index(np.arange(count) * prod(sizes) // count, sizes or (1,)), axis=-1)
    for dim, axis in enumerate(axes):
        held = {int(coordinates[row][dim]) for row in rows}
        if len(held) < sizes[dim] and len(rows) == sum(int(each[dim]) in held for each in coordinates):
            return f"what lies at {axis} {', '.join(map(str, sorted(held)))} ({text})"
    return text


def _only(batch: HostBatch, index: int) -> HostBatch:
    """Returns the batch with the weights of one row at 1 and of all others at 0."""
    weights = np.zeros_like(batch[WEIGHTS])
    weights[index] = 1
    return {**batch, WEIGHTS: weights}


def of_stages(case: Case, path: str, value: np.ndarray, expected: np.ndarray) -> str:
    """Describes the rows that do not count exactly once on stages with a wrong gradient; "" for none or all stages."""
    size = case.sizes.get(pipeline.AXIS, 1)
    if size == 1 or pipeline.AXIS not in case.row(path).layout.axes_of_dim(0):
        return ""
    stages = [slice(stage * len(value) // size, (stage + 1) * len(value) // size) for stage in range(size)]
    wrong = [stage for stage in range(size) if not is_same(value[stages[stage]], expected[stages[stage]])]
    if not 0 < len(wrong) < size:
        return ""
    where = f"stage {', '.join(map(str, wrong))} of {pipeline.AXIS} alone"
    said = of_rows(case, path, stages[wrong[0]])
    return f"on {where}: {said}" if said else f"it is wrong on {where}."


def leaf_of(tree: Any, path: str) -> Any:
    """Returns the leaf of a pytree at a path."""
    return dict(leaves_with_paths(tree))[path]


def is_same(value: np.ndarray, expected: np.ndarray) -> bool:
    """Checks if two arrays differ by at most `NEAR` of the largest element."""
    return bool(np.abs(value - expected).max(initial=0.0) <= NEAR * max(np.abs(expected).max(initial=0.0), 1e-300))
