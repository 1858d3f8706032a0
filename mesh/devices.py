"""Devices: their names (`"platform:id"`, for all processes), simulated CPU devices, accelerators of the host."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import jax

from .compat import Device, backend_started
from .errors import TooLateError, UserError, counted
from .targets import MARK, parse_target, target_devices

SCHEDULER_FLAG = "--xla_cpu_enable_concurrency_optimized_scheduler"
NVIDIA = Path("/proc/driver/nvidia/gpus")
"""One directory for each GPU that the driver knows."""
OTHER_ACCELERATORS = ("/dev/kfd", "/dev/accel0", "/dev/vfio/0")
"""Paths that exist on hosts with AMD GPUs or TPUs."""
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
PLATFORM_ALIASES = {"cuda": "gpu", "rocm": "gpu"}


def count_gpus(directory: Path = NVIDIA) -> int:
    """Returns the number of NVIDIA GPUs of this host; 0 without a driver. Does not start JAX."""
    if not os.access(directory, os.R_OK):
        return 0
    return len(os.listdir(directory))


def has_accelerators() -> bool:
    """Returns True if this host has a GPU or TPU. Does not start JAX."""
    return count_gpus() > 0 or any(os.path.exists(path) for path in OTHER_ACCELERATORS)


def list_devices(device_type: str | None = None, *, target: str | None = None) -> list[str]:
    """Returns the names of the devices of all processes, such as "cpu:0", in JAX's order. Opens JAX's devices.

    Args:
        device_type: "cpu", "gpu" or "tpu", in any case; None for the default platform.
        target: Accelerators that are not here, such as "h100:16x8" (16 hosts with 8 GPUs each): opens no device, and a
            step can be compiled for them, but not run.

    Raises:
        UserError: This machine does not have devices of that type, or the target is invalid.
    """
    if target is not None:
        if not has_accelerators():
            jax.config.update("jax_platforms", "cpu")  # otherwise, JAX's CUDA plugin looks for a driver
        return parse_target(target).device_names()
    platform = device_type.lower() if device_type else None
    try:
        return [device_name(device) for device in jax.devices(platform)]
    except RuntimeError as error:
        if platform is None:
            raise
        raise UserError(
            f"device_type={device_type!r}: unknown device type; JAX sees {_some(list_devices())}. "
            "Use one of the types it sees, or install the jaxlib plug-in for that type."
        ) from error


def get_device_count(device_type: str | None = None) -> int:
    """Returns the number of devices of all processes; see `list_devices`."""
    return len(list_devices(device_type))


def device_name(device: Device) -> str:
    """Returns the name of a JAX device, such as "gpu:3"."""
    return f"{device.platform}:{device.id}"


def find_devices(names: Iterable[str]) -> list[Device]:
    """Returns the JAX devices with these names, in order. Opens JAX's devices.

    Args:
        names: Names as in `list_devices`; "cuda:0" and "rocm:0" mean "gpu:0". All or none are devices of targets.

    Raises:
        UserError: Devices are missing on this machine, or the compiler of a target is.
    """
    names = list(names)
    if names and all(MARK in name for name in names):
        return [target_devices(name.partition(MARK)[2])[name] for name in names]
    present: dict[str, Device] = {}
    platforms = {_normal(name).partition(":")[0] for name in names}
    for platform in platforms:
        with suppress(RuntimeError):  # no such platform here
            for device in jax.devices(platform):
                present[device_name(device)] = device
    missing = [name for name in names if _normal(name) not in present]
    if missing:
        here = list_devices()
        raise UserError(
            f"{len(missing)} of the mesh's {len(names)} devices are not on this machine: {_some(missing)}. "
            f"JAX sees {counted(len(here), 'device')}: {_some(here)}. You can plan and lower with such a mesh "
            "(abstract_mesh), but not run. Use devices that exist, or DeviceMesh.simulated(n) for CPU devices."
        )
    return [present[_normal(name)] for name in names]


def simulate(num_devices: int) -> None:
    """Configures at least `num_devices` CPU devices for this process, and only uses the CPU.

    If JAX has opened its devices, this only checks their number. Also turns off the CPU scheduler that can start
    independent collectives in different orders on starved devices, which deadlocks, unless XLA_FLAGS set it.

    Args:
        num_devices: The number of CPU devices of this process, at least 1.

    Raises:
        UserError: `num_devices` is less than 1.
        TooLateError: The devices are already open, with fewer CPU devices (also a RuntimeError).
    """
    if num_devices < 1:
        raise UserError(f"simulate({num_devices}): the number of simulated devices must be at least 1.")
    if backend_started():
        _check_enough(num_devices)
        return
    flags = os.environ.get("XLA_FLAGS", "")
    if SCHEDULER_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {SCHEDULER_FLAG}=false".strip()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(num_devices, getattr(jax.config, "jax_num_cpu_devices", -1)))


def _check_enough(num_devices: int) -> None:
    try:
        available = len(jax.local_devices(backend="cpu"))
    except RuntimeError:  # JAX_PLATFORMS excludes the CPU
        available = 0
    if available < num_devices:
        raise TooLateError(
            f"simulate({num_devices}) is too late: JAX has already opened its devices, and this process has "
            f"{counted(available, 'CPU device')} ({available} < {num_devices}). The number is fixed once any array or "
            "device is used. Call simulate or DeviceMesh.simulated at the start of the program, set run.simulate "
            f"in the config, or start Python with JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES={num_devices}."
        )


def _normal(name: str) -> str:
    platform, _, number = name.lower().partition(":")
    return f"{PLATFORM_ALIASES.get(platform, platform)}:{number}"


def _some(names: list[str]) -> str:
    first = ", ".join(names[:4])
    if len(names) <= 4:
        return first
    return f"{first}, ... {names[-1]}"
