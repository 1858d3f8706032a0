"""Simulated CPU devices: as many as asked for, provided that JAX has not opened its devices yet."""

import os

import jax

from .compat import backend_started as backend_started
from .errors import TooLateError, UserError
from .text import counted

SCHEDULER_FLAG = "--xla_cpu_enable_concurrency_optimized_scheduler"


def simulate(num_devices: int) -> None:
    """Makes sure this process has at least `num_devices` CPU devices, and uses the CPU only.

    Before JAX opens its devices this configures them; afterwards it only checks. It also turns off the CPU
    scheduler that may start independent collectives in different orders on starved devices, which ends in a
    deadlock; XLA_FLAGS that already name the scheduler are left alone.

    Args:
        num_devices: CPU devices of this process, at least 1.

    Raises:
        UserError: If `num_devices` is less than 1.
        TooLateError: If the devices are open already and there are fewer CPU devices (a RuntimeError too).
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
    except RuntimeError:  # JAX_PLATFORMS left the CPU out
        available = 0
    if available < num_devices:
        raise TooLateError(
            f"simulate({num_devices}) is too late: JAX has already opened its devices, and this process has "
            f"{counted(available, 'CPU device')} ({available} < {num_devices}). The number is fixed once any array or "
            "device has been used. Call simulate or DeviceMesh.simulated first thing in the program, set run.simulate "
            f"in the config, or start Python with JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES={num_devices}."
        )
