"""Which dim of an array the next mesh axis splits: the one choice that FSDP and ZeRO share."""

from collections.abc import Sequence

from ..mesh.device_mesh import DeviceMesh
from .tensor_layout import TensorLayout


def split_further(
    layout: TensorLayout, shape: tuple[int, ...], mesh: DeviceMesh, axis: str, *, first: int
) -> tuple[TensorLayout, int] | None:
    """Adds an axis to a layout: on the first whole dim that it divides, else on a split dim whose parts it divides.

    The first, not the largest: parts of a leading dim lie one after the other in memory, so gathering them needs no
    transpose.

    Args:
        layout: The layout so far.
        shape: Global shape of the array.
        mesh: The mesh.
        axis: The axis to add.
        first: The first dim that may be split.

    Returns:
        The new layout and the dim, or None where the axis divides nothing.
    """
    size = mesh.axis_size(axis)
    for dim in sorted(range(first, len(shape)), key=lambda dim: layout.parts_of_dim(dim) > 1):
        if shape[dim] % (layout.parts_of_dim(dim) * size) == 0:
            return add_axis(layout, dim, axis, mesh), dim
    return None


def add_axis(layout: TensorLayout, dim: int, axis: str, mesh: DeviceMesh) -> TensorLayout:
    """Splits one dim by one more axis, inside the parts that it has."""
    names = (*layout.axes_of_dim(dim), axis)
    entries: Sequence[str | tuple[str, ...] | None] = [
        (names if len(names) > 1 else axis) if each == dim else entry for each, entry in enumerate(layout.axes)
    ]
    return TensorLayout(entries, mesh)
