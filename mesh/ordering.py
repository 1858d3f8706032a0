"""Physical order: neighbours in the list are neighbours on the network, so the last mesh axes get the fast links."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

Device = TypeVar("Device")


def physical_order(devices: Iterable[Device]) -> list[Device]:
    """Sorts devices from the slowest network to the fastest: slice, then process (host), then device.

    Filling a mesh row by row from this list puts its last axes (tensor, context) inside a host and lets its first
    ones (pipe, data) cross hosts.

    Args:
        devices: Objects with `process_index` and `id`, and `slice_index` where several slices are connected by a
            slower network (TPU multi-slice).

    Returns:
        The same devices, sorted.
    """
    return sorted(devices, key=_place)


def _place(device: Any) -> tuple[int, int, int]:
    return (getattr(device, "slice_index", None) or 0, device.process_index, device.id)


def axes_across(groups: np.ndarray, axis_names: Sequence[str]) -> tuple[str, ...]:
    """Finds the axes whose neighbours are in different groups.

    Args:
        groups: For each place in the mesh, the group (process or host) of its device; shaped like the mesh.
        axis_names: One name per axis.

    Returns:
        The names along which the group changes anywhere: a collective over such an axis crosses groups.
    """
    return tuple(
        name for axis, name in enumerate(axis_names) if bool(np.any(groups != np.take(groups, [0], axis=axis)))
    )
