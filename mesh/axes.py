"""The axes of a mesh: canonical names, sizes and their errors, and the order of devices along them."""

from collections.abc import Iterable, Sequence
from math import isqrt, prod
from typing import Any, TypeVar

import numpy as np

from .errors import UserError, counted

Device = TypeVar("Device")

AXES: tuple[str, ...] = ("pipe", "data", "fsdp", "expert", "context", "tensor")
"""Canonical axis names, slowest network first; an axis of size 1 costs nothing. The mesh of a run has the axes of
`parallel.STRATEGIES`."""

SYNONYMS: dict[str, str] = {
    **dict.fromkeys(("dp", "ddp", "data_parallel", "replicate", "replica"), "data"),
    **dict.fromkeys(("zero3", "zero_3", "zero-3", "sharded", "shard", "fully_sharded", "fsdp2", "hsdp"), "fsdp"),
    **dict.fromkeys(("tp", "mp", "model", "model_parallel", "tensor_parallel"), "tensor"),
    **dict.fromkeys(("pp", "pipeline", "stage", "stages", "pipeline_parallel"), "pipe"),
    **dict.fromkeys(
        ("cp", "sp", "seq", "sequence", "ring", "ulysses", "context_parallel", "sequence_parallel"), "context"
    ),
    **dict.fromkeys(("ep", "moe", "experts", "expert_parallel"), "expert"),
}
"""Lowercase names in other libraries -> the axis, for errors about unknown axes."""


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
    return sorted(devices, key=_place)


def _place(device: Any) -> tuple[int, int, int]:
    return (getattr(device, "slice_index", None) or 0, device.process_index, device.id)


def axes_across(groups: np.ndarray, axis_names: Sequence[str]) -> tuple[str, ...]:
    """Returns the axes along which the group changes: a collective over such an axis crosses groups.

    Args:
        groups: The group (process or host) of each device, shaped like the mesh.
        axis_names: One name per axis.
    """
    return tuple(
        name for axis, name in enumerate(axis_names) if bool(np.any(groups != np.take(groups, [0], axis=axis)))
    )


def check_shape(shape: Sequence[int], axis_names: Sequence[str]) -> None:
    """Checks sizes and names before any device is counted.

    Args:
        shape: One size per axis.
        axis_names: One name per axis.

    Raises:
        UserError: Sizes or names are empty, differ in length, repeat or are invalid.
    """
    if not shape or not axis_names:
        raise UserError(
            f"Shape and axis_names cannot be empty. Received: shape={shape}, axis_names={axis_names}. "
            "A single device is shape (1,) with one axis name."
        )
    if len(shape) != len(axis_names):
        raise UserError(
            f"Shape and axis_names should have same size. Received: shape={shape} ({len(shape)} sizes), "
            f"axis_names={axis_names} ({len(axis_names)} names). Give one name per size."
        )
    if invalid := [name for name in axis_names if not isinstance(name, str) or not name]:
        raise UserError(
            f"Mesh axis names must be strings of at least one character. Received: axis_names={axis_names}, with "
            f"{', '.join(map(repr, invalid))}. Give each axis a name, such as 'data'."
        )
    repeated = sorted({name for name in axis_names if list(axis_names).count(name) > 1})
    if repeated:
        raise UserError(f"axis_names={axis_names} repeats {repeated}; each axis needs its own name.")
    wrong = [f"{name}={size}" for name, size in zip(axis_names, shape, strict=True) if not _is_size(size)]
    if wrong:
        raise UserError(
            f"Mesh sizes must be integers of at least 1, or one -1 for the remaining devices. Received: "
            f"{', '.join(wrong)}."
        )
    if list(shape).count(-1) > 1:
        raise UserError(
            f"Only one mesh size can be -1 (the remaining devices). Received: {sizes_text(shape, axis_names)}."
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
    if -1 in shape and num_devices % known == 0 and num_devices:
        return tuple(num_devices // known if size == -1 else int(size) for size in shape)
    if known == num_devices and -1 not in shape:
        return tuple(int(size) for size in shape)
    arithmetic = " x ".join(str(size) for size in shape if size != 1) or "1"
    if -1 in shape:
        arithmetic = f"{num_devices} % {known} = {num_devices % known}, so -1 is not an integer"
    else:
        arithmetic = f"{arithmetic} = {known}, not {num_devices}"
    raise UserError(
        f"Shape does not match the number of devices. Received: {sizes_text(shape, axis_names)} for "
        f"{counted(num_devices, 'device')}: {arithmetic}. {_remedy(shape, axis_names, num_devices)}"
    )


def sizes_text(shape: Sequence[int], axis_names: Sequence[str]) -> str:
    """Formats sizes without axes of size 1: "data=2, fsdp=4"."""
    pairs = [f"{name}={size}" for name, size in zip(axis_names, shape, strict=True) if size != 1]
    return ", ".join(pairs) or f"{axis_names[-1]}=1"


def divisors(number: int) -> list[int]:
    """Returns the divisors of a positive integer in order."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return small + [number // divisor for divisor in reversed(small) if divisor * divisor != number]


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and (size >= 1 or size == -1)


def _remedy(shape: Sequence[int], axis_names: Sequence[str], num_devices: int) -> str:
    proposals = []
    for axis, size in enumerate(shape):
        rest = prod(other for place, other in enumerate(shape) if place != axis and other != -1)
        fits = size != 1 and num_devices % rest == 0 and num_devices >= rest
        if fits and not (-1 in shape and size != -1):
            proposals.append([*shape[:axis], num_devices // rest, *shape[axis + 1 :]])
    if not proposals:
        proposals.append(_closest(shape, num_devices))
    texts = list(dict.fromkeys(sizes_text(proposal, axis_names) for proposal in proposals))
    fitting = f"Sizes that fit {counted(num_devices, 'device')}: {'; or '.join(texts)}"
    return f"{fitting}. {_simulated(shape, axis_names, num_devices)}Or name the devices to use: devices=[...]."


def _simulated(shape: Sequence[int], axis_names: Sequence[str], num_devices: int) -> str:
    """Returns how to simulate the missing devices of a mesh with at least one; empty if none is missing."""
    wanted = prod(size for size in shape if size != -1)
    if wanted <= num_devices:
        return ""
    sizes = f", {sizes_text(shape, axis_names)}" * (set(axis_names) <= set(AXES))  # only canonical axes
    return f"To simulate {wanted} CPU devices, begin the program with spmdkit.DeviceMesh.simulated({wanted}{sizes}). "


def _closest(shape: Sequence[int], num_devices: int) -> list[int]:
    """Keeps each size as large as the devices allow, the last (fastest) axes first; one axis takes the rest."""
    taker = list(shape).index(-1) if -1 in shape else next((axis for axis, size in enumerate(shape) if size > 1), 0)
    sizes, rest = list(shape), num_devices
    for axis in reversed(range(len(sizes))):
        if axis != taker:
            sizes[axis] = max(size for size in divisors(rest) if size <= sizes[axis])
            rest //= sizes[axis]
    sizes[taker] = rest
    return sizes
