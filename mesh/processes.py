"""Joining the processes of one run."""

import os
from typing import Any

import jax

from .compat import backend_started
from .errors import TooLateError, UserError

ENVIRONMENTS = ("SPMDKIT_", "KERAS_DISTRIBUTION_")
"""Prefixes of the environment variables read for missing arguments, in order."""


def initialize(
    job_addresses: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    initialization_timeout: int = 300,
    heartbeat_timeout_seconds: int = 100,
    shutdown_timeout_seconds: int = 300,
) -> None:
    """Connects this process to the others of the run; call it before anything touches a device.

    Arguments left at None are read from SPMDKIT_JOB_ADDRESSES, SPMDKIT_NUM_PROCESSES and SPMDKIT_PROCESS_ID, then
    from the same names with KERAS_DISTRIBUTION_. What is still missing is left to JAX's detection of the cluster
    (Cloud TPU, Slurm, Open MPI, Kubernetes). A second call does nothing.

    Args:
        job_addresses: Comma-separated "host:port" of every process, the coordinator first; or the coordinator alone.
        num_processes: Number of processes.
        process_id: This process, 0 <= process_id < num_processes; 0 is the coordinator.
        initialization_timeout: Seconds to wait for the other processes.
        heartbeat_timeout_seconds: Seconds after which a silent process counts as dead.
        shutdown_timeout_seconds: Seconds to wait for the others at exit.

    Raises:
        UserError: If the number of addresses is not `num_processes`, an environment variable is not a number, or
            the process id is out of range.
        TooLateError: If JAX has opened its devices already (a RuntimeError too).
    """
    if jax.distributed.is_initialized():
        return
    job_addresses = job_addresses or _from_environment("JOB_ADDRESSES")
    num_processes = _number("NUM_PROCESSES") if num_processes is None else num_processes
    process_id = _number("PROCESS_ID") if process_id is None else process_id
    coordinator, num_processes = _coordinator(job_addresses, num_processes)
    _check(num_processes, process_id)
    complete = None not in (coordinator, num_processes, process_id)
    jax.distributed.initialize(
        coordinator_address=coordinator,
        num_processes=num_processes,
        process_id=process_id,
        cluster_detection_method="deactivate" if complete else None,
        initialization_timeout=initialization_timeout,
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
        shutdown_timeout_seconds=shutdown_timeout_seconds,
    )


def is_main_process() -> bool:
    """Tells whether this is process 0. Opens JAX's devices, so call `initialize` first.

    Returns:
        True in the one process that prints and writes for all.
    """
    return jax.process_index() == 0


def local_copy(value: Any) -> Any:
    """This process's copy of an array that every device holds whole; to read it involves no other process.

    Returns:
        One device's array; what is no `jax.Array` as it is.
    """
    return value.addressable_data(0) if isinstance(value, jax.Array) else value


def _from_environment(name: str) -> str | None:
    return next((os.environ[prefix + name] for prefix in ENVIRONMENTS if os.environ.get(prefix + name)), None)


def _number(name: str) -> int | None:
    text = _from_environment(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        variable = next(prefix + name for prefix in ENVIRONMENTS if os.environ.get(prefix + name))
        raise UserError(f"Environment variable {variable}={text!r} must be a whole number.") from None


def _coordinator(job_addresses: str | None, num_processes: int | None) -> tuple[str | None, int | None]:
    if job_addresses is None or "," not in job_addresses:
        return job_addresses, num_processes
    addresses = [address.strip() for address in job_addresses.split(",")]
    if num_processes is not None and num_processes != len(addresses):
        raise UserError(
            f"The provided job_addresses {addresses} has {len(addresses)} jobs, but num_processes is {num_processes}. "
            "Give one address per process, or the coordinator's address alone."
        )
    return addresses[0], len(addresses)


def _check(num_processes: int | None, process_id: int | None) -> None:
    if num_processes is not None and num_processes < 1:
        raise UserError(f"num_processes={num_processes} must be at least 1.")
    if None not in (num_processes, process_id) and not 0 <= process_id < num_processes:  # pyright: ignore
        raise UserError(
            f"process_id={process_id} must be in 0 .. num_processes - 1 = {num_processes - 1}."  # pyright: ignore
        )
    if backend_started():
        raise TooLateError(
            "initialize() is too late: JAX has already opened its devices, so this process would train alone. "
            "Call it before anything that asks for devices or makes an array (also in what you import)."
        )
