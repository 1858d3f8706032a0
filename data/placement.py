"""Which rows of a batch a process holds, and how they become global arrays on the mesh.

Everything follows from the sharding, never from a process's rank: processes that hold the same rows (because another
mesh axis tells them apart) read the same rows, and a process reads each of its rows once, however many of its devices
hold it. No process talks to another.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from ..mesh.compat import Device
from ..mesh.errors import UserError


def rows_of_devices(sharding: NamedSharding, global_batch: int, devices: Iterable[Device]) -> np.ndarray:
    """The rows of the global batch that some devices hold.

    Args:
        sharding: Sharding of the rows, such as P(("data", "fsdp")).
        global_batch: Rows in the batch, over all processes.
        devices: Devices of the sharding's mesh, such as those of one process.

    Returns:
        int64, the row indices, sorted, each once.

    Raises:
        UserError: the mesh does not split `global_batch` rows evenly.
    """
    check_divisible(sharding, global_batch)
    index_of = sharding.devices_indices_map((global_batch,))
    held = {index_of[device][0].indices(global_batch)[:2] for device in devices}
    return np.unique(np.concatenate([np.arange(start, stop) for start, stop in held]))


def check_divisible(sharding: NamedSharding, global_batch: int) -> None:
    """Raises a UserError unless the sharding splits `global_batch` rows evenly."""
    axes = sharding.spec[0] if len(sharding.spec) else None
    axes = (axes,) if isinstance(axes, str) else tuple(axes or ())
    sizes = {axis: sharding.mesh.shape[axis] for axis in axes}
    parts = int(np.prod([*sizes.values()], dtype=np.int64))
    if global_batch < 1 or global_batch % parts:
        below, above = global_batch // parts * parts, (global_batch // parts + 1) * parts
        nearest = " or ".join(str(size) for size in (below, above) if size > 0)
        product = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise UserError(
            f"train.global_batch={global_batch} rows cannot be split over the mesh axes {product} = {parts} parts: "
            f"{global_batch} % {parts} = {global_batch % parts}. Set train.global_batch to {nearest}."
        )


def place_rows(
    local: Mapping[str, np.ndarray], rows: np.ndarray, sharding: NamedSharding, global_batch: int
) -> dict[str, jax.Array]:
    """Makes global arrays of the rows that this process has read.

    Args:
        local: Name -> the rows of this process, (len(rows), ...).
        rows: Their places in the global batch, from `rows_of_devices` with this process's devices.
        sharding: Sharding of the rows; further dims are not split.
        global_batch: Rows in the batch, over all processes.

    Returns:
        Name -> global array (global_batch, ...), sharded by `sharding`, of JAX's dtype for the NumPy dtype.
    """
    shapes = {name: (global_batch, *array.shape[1:]) for name, array in local.items()}
    return {
        name: jax.make_array_from_callback(shapes[name], sharding, place_part(array, rows, shapes[name]))
        for name, array in local.items()
    }


def place_part(
    array: np.ndarray, rows: np.ndarray, shape: Sequence[int]
) -> Callable[[tuple[slice, ...] | None], np.ndarray]:
    """Gives the part of a global array that a device holds, out of the rows that this process has read.

    Args:
        array: (len(rows), ...).
        rows: Their places in the global array, sorted.
        shape: Of the global array.
    """

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None, "arrays without a row dim have no part"
        start, stop, _ = index[0].indices(shape[0])
        first = int(np.searchsorted(rows, start))
        return array[(slice(first, first + stop - start), *index[1:])]

    return part
