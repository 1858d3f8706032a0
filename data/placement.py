"""Placing batches on the mesh: the rows that a process reads, and how they become global arrays.

Everything follows from the sharding, never from a process's rank: processes whose devices hold the same rows read the
same rows, and a process reads each of its rows once, even if several of its devices hold it. Processes do not
communicate.

The step splits the rows of a batch over `data`, `fsdp` and the other axes that split rows, and every device of a
`context` or `tensor` group holds the same rows: each of its hosts would read them, and send them to each of its
devices. A storage layout splits them further, so that one host reads each value and sends it to one device:

    data.layout: {".*": [[data, fsdp, context, tensor]]}           rows over all devices: fewer to read
    data.layout: {"inputs|targets": [[data, fsdp], context]}       rows as in the step, positions over `context`

A compiled program then moves a batch from the storage layout to that of the step: an all-gather between devices, whose
links are many times as fast as those to the host. It runs in the thread of the steps, so that all processes start their
collectives in the same order.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..layouts.paths import pattern_problem
from ..layouts.sizes import RowSplit
from ..layouts.tensor_layout import names_of
from ..mesh.compat import Device
from ..mesh.errors import UserError, counted, did_you_mean

Axes = str | Sequence[str] | None
Rules = Mapping[str, Sequence[Axes]]
KEY = "data.layout"


def rows_of_devices(sharding: NamedSharding, global_batch: int, devices: Iterable[Device]) -> np.ndarray:
    """Returns the rows of the global batch that some devices hold.

    Args:
        sharding: The sharding of the rows, such as P(("data", "fsdp")).
        global_batch: Rows in the batch, over all processes.
        devices: Devices of the sharding's mesh, such as those of one process.

    Returns:
        int64, the row indices, sorted, each once.

    Raises:
        UserError: The mesh does not split `global_batch` rows evenly.
    """
    check_divisible(sharding, global_batch)
    index_of = sharding.devices_indices_map((global_batch,))
    ranges = set()
    for device in devices:
        start, stop, _ = index_of[device][0].indices(global_batch)
        ranges.add((start, stop))
    return np.unique(np.concatenate([np.arange(start, stop) for start, stop in ranges]))


def check_divisible(sharding: NamedSharding, global_batch: int) -> None:
    """Raises a UserError unless the sharding splits `global_batch` rows evenly."""
    axes = names_of(sharding.spec[0]) if len(sharding.spec) else ()
    split = RowSplit({axis: sharding.mesh.shape[axis] for axis in axes})
    if not split.fits(global_batch):
        raise UserError(
            f"train.global_batch={global_batch} rows cannot be split over the mesh axes {split} = {split.total} parts: "
            f"{global_batch} % {split.total} = {global_batch % split.total}. Set train.global_batch to a multiple of "
            f"{split.total}; the nearest is {split.nearest(global_batch)}."
        )


class Storage:
    """The layout of batches before the step takes them.

    Args:
        rules: Regular expression of array names -> one entry per dim: a mesh axis, None or several axes. The first rule
            that matches a whole name applies; an array without a rule has the step's layout at once. An array with
            fewer dims than entries takes the first ones.
        step: The sharding of rows in the step; further dims are not split.

    Raises:
        UserError: A rule names an unknown axis or the same axis twice, or its key is not a valid regular expression.
    """

    def __init__(self, rules: Rules, step: NamedSharding) -> None:
        self._rules: dict[re.Pattern[str], tuple[tuple[str, ...], ...]] = {}
        for pattern, entries in rules.items():
            problem = pattern_problem(pattern)
            if problem is not None:
                raise UserError(f"{KEY}: {problem}")
            self._rules[re.compile(pattern)] = _entries(pattern, entries, step)
        self.step = step

    def sharding(self, name: str, shape: Sequence[int]) -> NamedSharding:
        """Returns the storage layout of an array of a batch with this global shape.

        Raises:
            UserError: The layout does not divide a dim.
        """
        entries = self._entries_of(name)
        if entries is None:
            return self.step
        entries = entries[: len(shape)]
        for dim, axes in enumerate(entries):
            parts = math.prod(self.step.mesh.shape[axis] for axis in axes)
            if shape[dim] % parts:
                raise UserError(
                    f"{KEY} splits dim {dim} of {name} {tuple(shape)} over {' x '.join(axes)} = {parts} parts: "
                    f"{shape[dim]} % {parts} = {shape[dim] % parts}. Remove an axis, or change the size of the dim."
                )
        return NamedSharding(self.step.mesh, PartitionSpec(*[axes or None for axes in entries]))

    def _entries_of(self, name: str) -> tuple[tuple[str, ...], ...] | None:
        """Returns the entries of the first rule that matches a name, or None."""
        for pattern, entries in self._rules.items():
            if pattern.fullmatch(name):
                return entries
        return None

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raises a UserError if arrays of these global shapes cannot be stored, or a rule matches none of them."""
        for name, shape in shapes.items():
            self.sharding(name, shape)
        for pattern, entries in self._rules.items():
            dims = {name: len(shape) for name, shape in shapes.items() if pattern.fullmatch(name)}
            if not dims:
                hint = did_you_mean(pattern.pattern, [*shapes])
                raise UserError(
                    f"{KEY}: {pattern.pattern!r} does not match any array of a batch ({', '.join(shapes)}).{hint}"
                )
            longest = max(dims, key=lambda name: dims[name])
            if len(entries) > dims[longest]:
                raise UserError(
                    f"{KEY}[{pattern.pattern!r}] has {len(entries)} entries, but {longest} has "
                    f"{counted(dims[longest], 'dim')}. Give at most one entry per dim."
                )

    def rows_of_devices(self, shapes: Mapping[str, Sequence[int]], devices: Sequence[Device]) -> np.ndarray:
        """Returns the rows of the global batch that some devices hold of any array: int64, sorted, each once."""
        shardings = {self.sharding(name, shape) for name, shape in shapes.items()}
        global_batch = next(iter(shapes.values()))[0]
        rows = []
        for sharding in shardings:
            sharding_of_rows = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
            rows.append(rows_of_devices(sharding_of_rows, global_batch, devices))
        return np.unique(np.concatenate(rows))

    def place(self, local: Mapping[str, np.ndarray], rows: np.ndarray, global_batch: int) -> dict[str, jax.Array]:
        """Places the rows that this process has read on its devices, each value only on those that store it.

        Args:
            local: Name -> the rows of this process, (len(rows), ...).
            rows: Their places in the global batch, from `rows_of_devices`.
            global_batch: Rows in the batch, over all processes.

        Returns:
            Name -> global array (global_batch, ...) in the storage layout, of JAX's dtype for the NumPy dtype.
        """
        placed = {}
        for name, array in local.items():
            shape = (global_batch, *array.shape[1:])
            part = _part_of(array, rows, global_batch)
            placed[name] = jax.make_array_from_callback(shape, self.sharding(name, shape), part)
        return placed

    def to_step(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Moves a batch to the layout of the step with one program, compiled once for each kind of batch."""
        moving = {name: array for name, array in batch.items() if array.sharding != self.step}
        if not moving:
            return dict(batch)
        return {**batch, **self.move(moving)}

    @functools.cached_property
    def move(self) -> "jax.stages.Wrapped":
        """The program from the storage layout to that of the step."""
        return jax.jit(lambda batch: batch, out_shardings=self.step)


def _part_of(
    array: np.ndarray, rows: np.ndarray, global_batch: int
) -> Callable[[tuple[slice, ...] | None], np.ndarray]:
    """Returns the function from the index of a device's part to its values, among the rows of this process."""

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None, "arrays without a row dim are not placed"
        start, stop, _ = index[0].indices(global_batch)
        first = int(np.searchsorted(rows, start))
        return array[(slice(first, first + stop - start), *index[1:])]

    return part


def _entries(pattern: str, entries: Sequence[Axes], step: NamedSharding) -> tuple[tuple[str, ...], ...]:
    """Returns the axes of each dim, without those of size 1."""
    axes_of_dims = [names_of(entry) for entry in entries]
    axes = list(chain.from_iterable(axes_of_dims))
    sizes = dict(step.mesh.shape)
    for axis in axes:
        if axis not in sizes:
            known = f"the mesh has {', '.join(sizes)}.{did_you_mean(axis, sizes)}"
            raise UserError(f"{KEY}[{pattern!r}]: unknown axis {axis!r}; {known}")
        if axes.count(axis) > 1:
            raise UserError(f"{KEY}[{pattern!r}] names the axis {axis} twice; an axis can split only one dim.")
    split = []
    for axes_of_dim in axes_of_dims:
        split.append(tuple(axis for axis in axes_of_dim if sizes[axis] > 1))
    return tuple(split)
