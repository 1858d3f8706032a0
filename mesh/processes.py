"""Joining the processes of one run."""

import os
import sys
from collections.abc import Callable
from typing import Any

import jax

from .compat import backend_started, keep_quiet_about_proxies
from .errors import TooLateError, UserError
from .joining.accelerators import has_accelerators
from .joining.addresses import is_loopback, own_ip
from .joining.detection import Job, find_job
from .joining.facts import from_addresses
from .joining.meeting import Meeting
from .joining.proxies import reach_directly
from .joining.rendezvous import meet, wait_until_listening


def tell(line: str) -> None:
    """Prints a line about the start of a run to stderr."""
    print(line, file=sys.stderr, flush=True)


def initialize(
    job_addresses: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    initialization_timeout: int = 300,
    heartbeat_timeout_seconds: int = 100,
    shutdown_timeout_seconds: int = 300,
    run: str = "",
    say: Callable[[str], None] = tell,
) -> None:
    """Connects this process to the others of the run; call it before anything touches a device.

    Arguments left at None are read from the environment: SPMDKIT_*, KERAS_DISTRIBUTION_*, JAX_*, then what Open MPI,
    PMI, Slurm or Kubernetes have set (`joining/sources.py`). In a run of one process this does nothing; where nothing
    says anything about a run, JAX looks whether this is a Cloud TPU. A second call does nothing.

    Args:
        job_addresses: Comma-separated "host:port" of every process, the coordinator first; or the coordinator alone.
        num_processes: Number of processes.
        process_id: This process, 0 <= process_id < num_processes; 0 is the coordinator.
        initialization_timeout: Seconds to wait for the other processes.
        heartbeat_timeout_seconds: Seconds after which a silent process counts as dead.
        shutdown_timeout_seconds: Seconds to wait for the others at exit.
        run: What is run, such as its folder; a process that gives another belongs to another run, and is refused.
        say: Gets a line now and then that says which processes are missing.

    Raises:
        UserError: What is known of the run is not whole, contradicts itself or cannot be: the variables are named.
        TooLateError: If JAX has opened its devices already (a RuntimeError too).
        ProcessesMissing: Some did not come within `initialization_timeout`; they are named.
        PortTaken: Something else listens at the coordinator's address.
    """
    if jax.distributed.is_initialized():
        return
    job = _find_job(job_addresses, num_processes, process_id)
    if job is not None and not job.is_shared:
        return
    if backend_started():
        raise TooLateError(
            "initialize() is too late: JAX has already opened its devices, so this process would train alone. "
            "Call it before anything that asks for devices or makes an array (also in what you import)."
        )
    timeouts = {
        "initialization_timeout": initialization_timeout,
        "heartbeat_timeout_seconds": heartbeat_timeout_seconds,
        "shutdown_timeout_seconds": shutdown_timeout_seconds,
    }
    if job is None:
        _leave_to_jax(timeouts)
        return
    note = {"own_ip": own_ip()}
    meeting = meet(job, seconds=initialization_timeout, run=run, note=note, check=check_own_names, say=say)
    _join(job, meeting, timeouts)


def check_own_names(meeting: Meeting, *, on_cpu: bool | None = None) -> None:
    """Makes sure that collectives on the CPU can connect.

    Gloo listens on the address that the host's own name resolves to, and tells it to the others: a loopback address
    means nothing to another host.

    Args:
        meeting: Of the processes of the run.
        on_cpu: Whether they compute on the CPU; found out by default.

    Raises:
        UserError: A host's own name resolves to nothing, or to a loopback address where there are several hosts.
    """
    on_cpu = (
        (getattr(jax.config, "jax_platforms", None) == "cpu" or not has_accelerators()) if on_cpu is None else on_cpu
    )
    if not on_cpu:
        return
    several = len(set(meeting.hosts)) > 1
    for rank, (host, note) in enumerate(zip(meeting.hosts, meeting.notes, strict=True)):
        ip = str(note.get("own_ip", ""))
        if not ip:
            raise UserError(
                f"Host {host} (rank {rank}) does not resolve its own name, and collectives on the CPU listen on the "
                f"address of that name. Add a line with its address and '{host}' to its /etc/hosts."
            )
        if several and is_loopback(ip):
            raise UserError(
                f"Host {host} (rank {rank}) resolves its own name to {ip}, which the other hosts cannot reach: "
                f"collectives on the CPU would go there. In its /etc/hosts, give '{host}' the address that the others "
                f"know it by, in place of {ip}."
            )


def _join(job: Job, meeting: Meeting, timeouts: dict[str, int]) -> None:
    """Starts JAX in all processes, which have met."""
    assert job.address is not None
    bind = None if os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") else meeting.bind
    reach_directly(job.address.host)
    keep_quiet_about_proxies()
    if job.process_id:
        wait_until_listening(job.address)
    jax.distributed.initialize(
        coordinator_address=str(job.address),
        num_processes=job.num_processes,
        process_id=job.process_id,
        local_device_ids=job.local_devices,
        cluster_detection_method="deactivate",
        coordinator_bind_address=str(bind) if bind else None,
        **timeouts,  # pyright: ignore[reportArgumentType]
    )


def _find_job(job_addresses: str | None, num_processes: int | None, process_id: int | None) -> Job | None:
    """The job of the arguments, and of the environment where they leave something out."""
    if num_processes is not None and num_processes < 1:
        raise UserError(f"num_processes={num_processes} must be at least 1.")
    if job_addresses is None and num_processes is None and process_id is None:
        return find_job()
    return find_job(given=from_addresses("initialize()", job_addresses, num_processes, process_id, "job_addresses", {}))


def _leave_to_jax(timeouts: dict[str, int]) -> None:
    """Lets JAX detect a Cloud TPU; a host that is none has nobody to connect to.

    Raises:
        UserError: It is none.
    """
    try:
        jax.distributed.initialize(**timeouts)  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        raise UserError(
            "initialize() has nobody to connect to: it was given no addresses, and no variable says that this process "
            f"is one of several; JAX says: {error} Set SPMDKIT_JOB_ADDRESSES, SPMDKIT_NUM_PROCESSES and "
            "SPMDKIT_PROCESS_ID, or leave the call out of a run of one process."
        ) from error


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
