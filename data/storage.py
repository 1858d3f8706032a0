"""Batches that are stored in one layout and computed with in another.

The step splits the rows of a batch over `data`, `fsdp` and what else splits rows, and every device of a `context` or
`tensor` group holds the same rows whole: each of its hosts would read them, and send them to each of its devices. A
layout of storage splits them further, so that every value is read by one host and sent to one device:

    data.layout: {".*": [[data, fsdp, context, tensor]]}           rows over all devices: fewer to read
    data.layout: {"inputs|targets": [[data, fsdp], context]}       rows as the step, positions over `context`

One compiled program then brings a batch from the layout of storage into that of the step: an all-gather over the axes
that split it further, between devices, whose links are many times as fast as those to the host. It runs in the thread
of the steps, so that all processes start their collectives in one order.
"""

import functools
import math
import re
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..mesh.compat import Device
from ..mesh.errors import UserError
from ..mesh.near_miss import did_you_mean
from ..mesh.text import counted
from .placement import place_part, rows_of_devices

Axes = str | Sequence[str] | None
Rules = Mapping[str, Sequence[Axes]]
KEY = "data.layout"
FORM = (
    'Give regular expressions of names -> a list with one entry per dim, a mesh axis, None or a list of axes: {".*": '
    '[["data", "fsdp"]]}.'
)


class Storage:
    """Where the arrays of a batch are put before the step takes them.

    Args:
        rules: Regular expression of the names of arrays -> one entry per dim: a mesh axis, None or several axes. The
            first that meets a whole name counts; an array that none meets goes where the step wants it, at once. An
            array with fewer dims than entries takes the first ones.
        step: How the step splits rows; further dims are not split.

    Raises:
        UserError: A rule is of another form, names an axis that the mesh has not, or one twice, or its key is no
            regular expression.
    """

    def __init__(self, rules: Rules, step: NamedSharding) -> None:
        _check_form(rules)
        self._rules = {_compiled(pattern): _entries(pattern, entries, step) for pattern, entries in rules.items()}
        self.step = step

    def sharding(self, name: str, shape: Sequence[int]) -> NamedSharding:
        """Where an array of a batch of a global shape is put.

        Raises:
            UserError: A dim cannot be split so.
        """
        entries = next((entries for pattern, entries in self._rules.items() if pattern.fullmatch(name)), None)
        if entries is None:
            return self.step
        for dim, axes in enumerate(entries[: len(shape)]):
            parts = math.prod(self.step.mesh.shape[axis] for axis in axes)
            if shape[dim] % parts:
                raise UserError(
                    f"{KEY} splits dim {dim} of {name} {tuple(shape)} over {' x '.join(axes)} = {parts} parts: "
                    f"{shape[dim]} % {parts} = {shape[dim] % parts}. Leave out an axis, or change the size of the dim."
                )
        return NamedSharding(self.step.mesh, PartitionSpec(*(axes or None for axes in entries[: len(shape)])))

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raises a UserError where arrays of these global shapes cannot be put so, or a rule meets none of them."""
        for name, shape in shapes.items():
            self.sharding(name, shape)
        for pattern in self._rules:
            met = {name: len(shape) for name, shape in shapes.items() if pattern.fullmatch(name)}
            if not met:
                hint = did_you_mean(pattern.pattern, [*shapes])
                raise UserError(f"{KEY}: {pattern.pattern!r} meets no array of a batch ({', '.join(shapes)}).{hint}")
            if len(self._rules[pattern]) > max(met.values()):
                given = f"{KEY}[{pattern.pattern!r}] has {len(self._rules[pattern])} entries"
                most = max(met, key=lambda name: met[name])
                raise UserError(f"{given}, but {most} has {counted(met[most], 'dim')}. Give at most one entry per dim.")

    def rows_of_devices(self, shapes: Mapping[str, Sequence[int]], devices: Sequence[Device]) -> np.ndarray:
        """The rows of the global batch that some devices hold of any of its arrays: int64, sorted, each once."""
        of_arrays = {self.sharding(name, shape) for name, shape in shapes.items()}
        global_batch = next(iter(shapes.values()))[0]
        held = [rows_of_devices(_of_rows(each), global_batch, devices) for each in of_arrays]
        return np.unique(np.concatenate(held))

    def place(self, local: Mapping[str, np.ndarray], rows: np.ndarray, global_batch: int) -> dict[str, jax.Array]:
        """Puts the rows that this process has read on its devices, each value on those alone that store it.

        Args:
            local: Name -> the rows of this process, (len(rows), ...).
            rows: Their places in the global batch, from `rows_of_devices`.
            global_batch: Rows in the batch, over all processes.

        Returns:
            Name -> global array (global_batch, ...) in the layout of storage.
        """
        placed = {}
        for name, array in local.items():
            shape = (global_batch, *array.shape[1:])
            part = place_part(array, rows, shape)
            placed[name] = jax.make_array_from_callback(shape, self.sharding(name, shape), part)
        return placed

    def to_step(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Brings a batch into the layout of the step: one program, compiled once for each kind of batch."""
        moving = {name: array for name, array in batch.items() if array.sharding != self.step}
        return {**batch, **self.move(moving)} if moving else dict(batch)

    @functools.cached_property
    def move(self) -> "jax.stages.Wrapped":
        """The program: arrays by name in the layout of storage -> the same in that of the step."""
        return jax.jit(lambda batch: batch, out_shardings=self.step)


def _check_form(rules: object) -> None:
    """Raises where rules are not what the type says: those of a config have been checked, others may be anything."""
    if not isinstance(rules, Mapping):
        raise UserError(f"{KEY}={rules!r} is no mapping. {FORM}")
    for pattern, entries in rules.items():
        if not isinstance(pattern, str):
            raise UserError(f"{KEY}: the key {pattern!r} is no text. {FORM}")
        if not isinstance(entries, list | tuple) or not all(map(_is_axes, entries)):
            raise UserError(f"{KEY}[{pattern!r}] = {entries!r} is no list of axes. {FORM}")


def _is_axes(entry: object) -> bool:
    axes = entry if isinstance(entry, list | tuple) else [] if entry is None else [entry]
    return all(isinstance(axis, str) for axis in axes)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f"{KEY}: {pattern!r} is no regular expression: {error}.") from error


def _entries(pattern: str, entries: Sequence[Axes], step: NamedSharding) -> tuple[tuple[str, ...], ...]:
    """The axes of each dim, those of size 1 left out: they split nothing."""
    named = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries]
    axes = [axis for entry in named for axis in entry]
    sizes = dict(step.mesh.shape)
    for axis in axes:
        if axis not in sizes:
            raise UserError(
                f"{KEY}[{pattern!r}] names the axis {axis}; the mesh has {', '.join(sizes)}.{did_you_mean(axis, sizes)}"
            )
        if axes.count(axis) > 1:
            raise UserError(f"{KEY}[{pattern!r}] names the axis {axis} twice; an axis splits one dim, once.")
    return tuple(tuple(axis for axis in entry if sizes[axis] > 1) for entry in named)


def _of_rows(sharding: NamedSharding) -> NamedSharding:
    """The same of dim 0 alone."""
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
