"""Placing batches on the mesh: the rows that a process reads, and how they become global arrays.

Everything follows from the sharding, never from a process's rank: processes whose devices hold the same rows read the
same rows, and a process reads each of its rows once, even if several of its devices hold it. Processes do not
communicate.

The step splits the rows of a batch over `data`, `fsdp` and the other axes that split rows, and every device of a
`context` or `tensor` group holds the same rows: each of its hosts would read them, and send them to each of its
devices. `data.layout` splits the rows further, so that one host reads each row and sends it to one device:

    data.layout: [data, fsdp, context, tensor]

A compiled program then moves a batch from this layout to that of the step: an all-gather between devices, whose
links are many times as fast as those to the host. It runs in the thread of the steps, so that all processes start their
collectives in the same order.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..mesh.compat import Device
from ..mesh.errors import UserError, unknown_name


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
    held = {index_of[device][0].indices(global_batch)[:2] for device in devices}
    return np.unique(np.concatenate([np.arange(start, stop) for start, stop in held]))


def check_divisible(sharding: NamedSharding, global_batch: int, other_fix: str = "") -> None:
    """Raises a UserError unless the sharding splits `global_batch` rows evenly."""
    axes = sharding.spec[0] if len(sharding.spec) else None
    axes = (axes,) if isinstance(axes, str) else tuple(axes or ())
    sizes = {axis: sharding.mesh.shape[axis] for axis in axes}
    parts = math.prod(sizes.values())
    if global_batch < 1 or global_batch % parts:
        below, above = global_batch // parts * parts, (global_batch // parts + 1) * parts
        nearest = " or ".join(str(size) for size in (below, above) if size > 0)
        product = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise UserError(
            f"train.global_batch={global_batch} rows cannot be split over the mesh axes {product} = {parts} parts: "
            f"{global_batch} % {parts} = {global_batch % parts}. Set train.global_batch to {nearest}{other_fix}."
        )


def storage_sharding(axes: Sequence[str], step: NamedSharding, global_batch: int) -> NamedSharding:
    """Returns the sharding of the rows of a batch where they are read, before the step takes them.

    Args:
        axes: The mesh axes that split the rows, slowest first (`data.layout`); empty: those of the step.
        step: The sharding of the rows in the step; its devices need not exist.
        global_batch: Rows in the batch, over all processes.

    Raises:
        UserError: An axis is unknown or listed twice, or an axis does not split `global_batch` rows evenly.
    """
    check_divisible(step, global_batch)
    if not axes:
        return step
    for axis in axes:
        if axis not in step.mesh.shape:
            raise UserError(f"data.layout: {unknown_name('mesh axis', axis, step.mesh.shape)}")
        if list(axes).count(axis) > 1:
            raise UserError(f"data.layout={list(axes)} lists {axis} twice; an axis can split the rows only once.")
    stored = NamedSharding(step.mesh, PartitionSpec(tuple(axes)))
    check_divisible(stored, global_batch, " or remove an axis from data.layout")
    return stored


def place(
    local: Mapping[str, np.ndarray], rows: np.ndarray, global_batch: int, sharding: NamedSharding
) -> dict[str, jax.Array]:
    """Places the rows that this process has read on its devices.

    Args:
        local: Name -> the rows of this process, (len(rows), ...).
        rows: Their places in the global batch, from `rows_of_devices`.
        global_batch: Rows in the batch, over all processes.
        sharding: The sharding of the rows; further dims are not split.

    Returns:
        Name -> global array (global_batch, ...), of JAX's dtype for the NumPy dtype.
    """

    def part(array: np.ndarray, index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None, "arrays without a row dim are not placed"
        start, stop, _ = index[0].indices(global_batch)
        first = int(np.searchsorted(rows, start))
        return array[first : first + stop - start]

    return {
        name: jax.make_array_from_callback((global_batch, *array.shape[1:]), sharding, functools.partial(part, array))
        for name, array in local.items()
    }


@functools.cache
def mover(sharding: NamedSharding) -> "jax.stages.Wrapped":
    """Returns the program that moves a batch to a sharding, compiled once for each kind of batch."""
    return jax.jit(lambda batch: batch, out_shardings=sharding)
