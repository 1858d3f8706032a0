"""The arithmetic of mesh sizes: checks, the one -1, and errors that propose sizes that fit."""

from collections.abc import Sequence
from math import isqrt, prod

from .axes import AXES
from .errors import UserError
from .text import counted


def check_shape(shape: Sequence[int], axis_names: Sequence[str]) -> None:
    """Checks sizes and names before any device is counted.

    Args:
        shape: One size per axis.
        axis_names: One name per axis.

    Raises:
        UserError: If either is empty, they differ in length, a name repeats or is not a string of at least one
            character, or a size is not >= 1 (one -1 allowed).
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
            f"Mesh sizes must be whole numbers, at least 1 or one -1 for the rest. Received: {', '.join(wrong)}."
        )
    if list(shape).count(-1) > 1:
        raise UserError(f"Only one mesh size may be -1 (the rest). Received: {sizes_text(shape, axis_names)}.")


def resolve_shape(shape: Sequence[int], axis_names: Sequence[str], num_devices: int) -> tuple[int, ...]:
    """Fills in the -1 and checks that the sizes multiply to the number of devices.

    Args:
        shape: Sizes that passed `check_shape`.
        axis_names: One name per axis.
        num_devices: Devices to place.

    Returns:
        The sizes, all at least 1.

    Raises:
        UserError: If they do not multiply out; proposes sizes that do.
    """
    known = prod(size for size in shape if size != -1)
    if -1 in shape and num_devices % known == 0 and num_devices:
        return tuple(num_devices // known if size == -1 else int(size) for size in shape)
    if known == num_devices and -1 not in shape:
        return tuple(int(size) for size in shape)
    arithmetic = " x ".join(str(size) for size in shape if size != 1) or "1"
    if -1 in shape:
        arithmetic = f"{num_devices} % {known} = {num_devices % known}, so -1 has no whole size"
    else:
        arithmetic = f"{arithmetic} = {known}, not {num_devices}"
    raise UserError(
        f"Shape does not match the number of devices. Received: {sizes_text(shape, axis_names)} for "
        f"{counted(num_devices, 'device')}: {arithmetic}. {_remedy(shape, axis_names, num_devices)}"
    )


def sizes_text(shape: Sequence[int], axis_names: Sequence[str]) -> str:
    """Writes sizes for people, leaving out axes of size 1.

    Args:
        shape: One size per axis.
        axis_names: One name per axis.

    Returns:
        For example "data=2, fsdp=4"; "one device" where all sizes are 1.
    """
    pairs = [f"{name}={size}" for name, size in zip(axis_names, shape, strict=True) if size != 1]
    return ", ".join(pairs) or f"{axis_names[-1]}=1"


def divisors(number: int) -> list[int]:
    """Lists the whole numbers that divide a number, from 1 up; quick for large numbers too.

    Args:
        number: At least 1.
    """
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
    sizes = f", {sizes_text(shape, axis_names)}" * (set(axis_names) <= set(AXES))  # it has the canonical axes alone
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
