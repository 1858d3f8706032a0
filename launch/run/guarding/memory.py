"""Is there room for a run? Asked before anything is compiled, of what every device must hold in any case.

And how much was in use in the end.
"""

import os
import sys
from contextlib import suppress

import jax

from ....layouts.sizes import counted, format_bytes
from ....mesh.errors import UserError
from ..build import Built


def check_memory(built: Built) -> None:
    """Checks that this process can hold its part of the state: parameters and what the optimizer keeps of them.

    Activations, gradients and copies come on top, so a run that passes may still run out of memory.

    Raises:
        UserError: It cannot.
    """
    tables = (built.layouts.table, built.step.optimizer_table, built.step.extra_table)
    each = sum(table.bytes_per_device for table in tables)
    devices = jax.local_devices()
    room, whose = _room(devices)
    together = 1 if whose == "device" else len(devices)
    if room is None or each * together <= room:
        return
    arithmetic = f"{together} x {format_bytes(each)} = {format_bytes(each * together)}" if together > 1 else ""
    holds = f"a device has {format_bytes(room)}" if whose == "device" else f"{whose} {format_bytes(room)}"
    raise UserError(
        f"The state of this run does not fit: parameters and optimizer take {format_bytes(each)} on each device"
        f"{f', {arithmetic}' if arithmetic else ''}, and {holds}. Make the model smaller (model.width, model.layers), "
        "split its state over more devices (strategy.fsdp), or take an optimizer that keeps less (adafactor, sgd)."
    )


def measured_memory() -> dict[str, int]:
    """The most bytes that were in use at once so far, as the backend counts them, or the system for processors.

    Returns:
        Whose -> bytes: the fullest device of this process; of processors, the process with all its devices. Empty where
        nobody tells.
    """
    devices = jax.local_devices()
    if devices[0].platform != "cpu":
        peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in devices]
        return {"fullest device": max(peaks)} if max(peaks) else {}
    with suppress(ImportError, OSError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return {
            f"the process, with {counted(len(devices), 'device')}": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            * unit
        }
    return {}


def _room(devices: list) -> tuple[int | None, str]:
    """Bytes that there are, None where nobody knows, and whose they are."""
    if devices[0].platform != "cpu":
        statistics = devices[0].memory_stats() or {}
        return statistics.get("bytes_limit"), "device"
    limits = [(_physical_bytes(), "this machine has")]
    with suppress(ImportError, OSError, ValueError):
        import resource

        limits.append((resource.getrlimit(resource.RLIMIT_AS)[0], "ulimit -v allows"))
    known = [(limit, words) for limit, words in limits if limit is not None and limit > 0]
    return min(known, default=(None, ""))


def _physical_bytes() -> int | None:
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
