"""Which accelerators a host has, and which of them are this process's."""

import os
from collections.abc import Mapping
from pathlib import Path

NVIDIA = Path("/proc/driver/nvidia/gpus")
"""One folder for each GPU that the driver knows."""
OTHERS = ("/dev/kfd", "/dev/accel0", "/dev/vfio/0")
"""What is there where the host has GPUs of AMD, or TPUs."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus_of_host(folder: Path = NVIDIA) -> int:
    """How many GPUs of NVIDIA the driver of this host knows; 0 without a driver."""
    try:
        return sum(1 for _ in folder.iterdir())
    except OSError:
        return 0


def has_accelerators() -> bool:
    """Tells whether this host has anything that JAX might compute on but the CPU."""
    return gpus_of_host() > 0 or any(os.path.exists(path) for path in OTHERS)


def gpus_visible(environ: Mapping[str, str], of_host: int) -> int:
    """How many GPUs a process sees: those that CUDA_VISIBLE_DEVICES names, all of the host where it is not set.

    Args:
        environ: Of the process.
        of_host: GPUs of the host.
    """
    text = environ.get(VISIBLE)
    if text is None:
        return of_host
    named = [part.strip() for part in text.split(",")]
    stop = next((index for index, part in enumerate(named) if part in ("", "-1", "NoDevFiles")), len(named))
    return min(stop, of_host) if of_host else stop


def devices_of_process(visible: int, local_rank: int | None, local_processes: int | None) -> tuple[int, ...] | None:
    """Divides the GPUs that all processes of a host see among them: with one each, process k has GPU k.

    Args:
        visible: GPUs that each of the processes sees.
        local_rank: Which process of the host this is.
        local_processes: How many there are.

    Returns:
        Places of this process's GPUs among the visible ones; None = all that it sees: it is alone on its host, its
        launcher has bound it to one already, or they do not divide evenly.
    """
    if local_rank is None or local_processes is None or local_processes < 2 or visible < 2:
        return None
    each, left_over = divmod(visible, local_processes)
    if left_over or not each or local_rank >= local_processes:
        return None
    return tuple(range(local_rank * each, (local_rank + 1) * each))
