"""Devices by name: `"platform:id"` strings for all devices of all processes."""

from collections.abc import Iterable

import jax

from .compat import Device
from .errors import UserError
from .text import counted

PLATFORM_ALIASES = {"cuda": "gpu", "rocm": "gpu"}


def list_devices(device_type: str | None = None) -> list[str]:
    """Lists the devices of all processes. Opens JAX's devices.

    Args:
        device_type: "cpu", "gpu" or "tpu", in any case; None for the default platform.

    Returns:
        Names such as "cpu:0", global, in JAX's order.

    Raises:
        UserError: If this machine has no device of that type.
    """
    return [device_name(device) for device in _devices(device_type)]


def get_device_count(device_type: str | None = None) -> int:
    """Counts the devices of all processes. Opens JAX's devices.

    Args:
        device_type: "cpu", "gpu" or "tpu", in any case; None for the default platform.

    Returns:
        The global number of devices.

    Raises:
        UserError: If this machine has no device of that type.
    """
    return len(_devices(device_type))


def device_name(device: Device) -> str:
    """Names a device as `list_devices` does.

    Args:
        device: A JAX device.

    Returns:
        For example "cpu:0" or "gpu:3".
    """
    return f"{device.platform}:{device.id}"


def find_devices(names: Iterable[str]) -> list[Device]:
    """Looks devices up by name. Opens JAX's devices.

    Args:
        names: Names as `list_devices` gives them; "cuda:0" and "rocm:0" stand for "gpu:0".

    Returns:
        The JAX devices, in the order of the names.

    Raises:
        UserError: If any name has no device here; lists the missing and the present ones.
    """
    names = list(names)
    present = {name: device for platform in _platforms(names) for name, device in _by_name(platform).items()}
    missing = [name for name in names if _normal(name) not in present]
    if missing:
        here = list_devices()
        raise UserError(
            f"{len(missing)} of the mesh's {len(names)} devices are not on this machine: {_some(missing)}. "
            f"JAX sees {counted(len(here), 'device')}: {_some(here)}. Such a mesh can be planned and lowered with "
            "(abstract_mesh), not run. Use devices that exist, or DeviceMesh.simulated(n) for CPU devices."
        )
    return [present[_normal(name)] for name in names]


def _devices(device_type: str | None) -> list[Device]:
    platform = device_type.lower() if device_type else None
    try:
        return jax.devices(platform)
    except RuntimeError as error:
        if platform is None:
            raise
        raise UserError(
            f"device_type={device_type!r}: JAX has no such devices here; it sees {_some(list_devices())}. "
            "Use one of the types it sees, or install the jaxlib plug-in for that type."
        ) from error


def _platforms(names: list[str]) -> list[str]:
    return sorted({_normal(name).split(":")[0] for name in names})


def _by_name(platform: str) -> dict[str, Device]:
    try:
        return {device_name(device): device for device in jax.devices(platform)}
    except RuntimeError:  # no such platform here
        return {}


def _normal(name: str) -> str:
    platform, _, number = name.lower().partition(":")
    return f"{PLATFORM_ALIASES.get(platform, platform)}:{number}"


def _some(names: list[str], limit: int = 4) -> str:
    return ", ".join(names[:limit]) + (f", ... {names[-1]}" if len(names) > limit else "")
