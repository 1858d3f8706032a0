"""The axes of a mesh: canonical names, sizes and their errors, and the order of devices along them."""

from collections.abc import Iterable, Iterator, Sequence
from math import isqrt, prod
from typing import Any, TypeVar

import numpy as np

from .errors import UserError, counted

Device = TypeVar("Device")

AXES: tuple[str, ...] = ("pipe", "data", "fsdp", "expert", "context", "tensor")
"""Canonical axis names, slowest network first; an axis of size 1 costs nothing. The mesh of a run has the axes of
`parallel.STRATEGIES`."""

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "data": ("dp", "ddp", "data_parallel", "replicate", "replica"),
    "fsdp": ("zero3", "zero_3", "zero-3", "sharded", "shard", "fully_sharded", "fsdp2", "hsdp"),
    "tensor": ("tp", "mp", "model", "model_parallel", "tensor_parallel"),
    "pipe": ("pp", "pipeline", "stage", "stages", "pipeline_parallel"),
    "context": ("cp", "sp", "seq", "sequence", "ring", "ulysses", "context_parallel", "sequence_parallel"),
    "expert": ("ep", "moe", "experts", "expert_parallel"),
}
"""Axis -> its lowercase names in other libraries, for errors about unknown axes."""

SYNONYMS: dict[str, str] = {}
"""Lowercase names in other libraries -> the axis."""
for _axis, _names in OTHER_NAMES.items():
    SYNONYMS.update(dict.fromkeys(_names, _axis))


def physical_order(devices: Iterable[Device]) -> list[Device]:
    """Sorts devices from the slowest network to the fastest: slice, then process (host), then device.

    Filling a mesh row by row from this list puts its last axes (tensor, context) inside a host and lets its first
    ones (pipe, data) cross hosts.

    Args:
        devices: Objects with `process_index` and `id`, and `slice_index` if several slices are connected by a
            slower network (TPU multi-slice).

    Returns:
        The same devices, sorted.
    """

    def place(device: Any) -> tuple[int, int, int]:
        return getattr(device, "slice_index", None) or 0, device.process_index, device.id

    return sorted(devices, key=place)


def axes_across(groups: np.ndarray, axis_names: Sequence[str]) -> tuple[str, ...]:
    """Returns the axes along which the group changes: a collective over such an axis crosses groups.

    Args:
        groups: The group (process or host) of each device, shaped like the mesh.
        axis_names: One name per axis.
    """
    crossing = []
    for axis, name in enumerate(axis_names):
        first_along_axis = np.take(groups, [0], axis=axis)
        if (groups != first_along_axis).any():
            crossing.append(name)
    return tuple(crossing)


def check_shape(shape: Sequence[int], axis_names: Sequence[str]) -> None:
    """Checks sizes and names before any device is counted.

    Args:
        shape: One size per axis.
        axis_names: One name per axis.

    Raises:
        UserError: Sizes or names are missing, differ in number, repeat or are invalid.
    """
    are_sequences = not isinstance(shape, int) and not isinstance(axis_names, str)
    if not are_sequences or not shape or len(shape) != len(axis_names):
        raise UserError(
            f"shape and axis_names must have one entry for each axis, got shape={shape!r} and "
            f"axis_names={axis_names!r}. Write DeviceMesh((2, 4), ('data', 'fsdp')), for example."
        )
    are_names = all(isinstance(name, str) and name for name in axis_names)
    if not are_names or len(set(axis_names)) < len(axis_names):
        raise UserError(f"axis_names must be different non-empty strings, such as 'data', got {axis_names!r}.")
    wrong = [size for size in shape if type(size) is not int or (size < 1 and size != -1)]
    if wrong or list(shape).count(-1) > 1:
        raise UserError(
            f"Mesh sizes must be integers of at least 1, or one -1 for the remaining devices, got "
            f"{sizes_text(shape, axis_names)}."
        )


def resolve_shape(shape: Sequence[int], axis_names: Sequence[str], num_devices: int) -> tuple[int, ...]:
    """Resolves -1 and checks that the product of the sizes is the number of devices.

    Args:
        shape: Sizes that passed `check_shape`.
        axis_names: One name per axis.
        num_devices: The number of devices.

    Raises:
        UserError: The product differs; the message proposes sizes that fit.
    """
    known = prod(size for size in shape if size != -1)
    remaining = num_devices // known
    sizes = tuple(remaining if size == -1 else size for size in shape)
    if num_devices > 0 and prod(sizes) == num_devices:
        return sizes
    if -1 in shape:
        arithmetic = f"{num_devices} % {known} = {num_devices % known}, so -1 is not an integer"
    else:
        factors = " x ".join(str(size) for size in shape if size != 1) or "1"
        arithmetic = f"{factors} = {known}, not {num_devices}"
    remedy = f"Choose sizes with the product {num_devices}"
    for fitting in _fitting_shapes(shape, num_devices):
        remedy += f"; for example {sizes_text(fitting, axis_names)}"
    if known > num_devices:
        remedy += f"; or simulate CPU devices: begin the program with spmdkit.DeviceMesh.simulated({known}, ...)"
    raise UserError(
        f"Shape does not match the number of devices. Received: {sizes_text(shape, axis_names)} for "
        f"{counted(num_devices, 'device')}: {arithmetic}. {remedy}; or name the devices to use: devices=[...]."
    )


def _fitting_shapes(shape: Sequence[int], num_devices: int) -> Iterator[list[int]]:
    """Yields the shapes that fit the number of devices and differ in one size over 1; none for a shape with -1."""
    if -1 in shape:
        return
    product = prod(shape)
    for axis, size in enumerate(shape):
        product_of_others = product // size
        if size != 1 and num_devices % product_of_others == 0:
            fitting = list(shape)
            fitting[axis] = num_devices // product_of_others
            yield fitting


def sizes_text(shape: Sequence[int], axis_names: Sequence[str]) -> str:
    """Formats sizes without axes of size 1: "data=2, fsdp=4"."""
    pairs = [f"{name}={size}" for name, size in zip(axis_names, shape, strict=True) if size != 1]
    return ", ".join(pairs) or f"{axis_names[-1]}=1"


def divisors(number: int) -> list[int]:
    """Returns the divisors of a positive integer in order."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    large = [number // divisor for divisor in reversed(small)]
    if small[-1] == large[0]:  # the number is a square
        large = large[1:]
    return small + large
