"""`initialize`: connects this process to the others of its run, through the rendezvous and JAX."""

import os

import jax

from ...mesh.compat import backend_started, keep_quiet_about_proxies
from ...mesh.devices import has_accelerators
from ...mesh.errors import TooLateError, UserError
from .addresses import bypass_proxy, is_loopback, own_ip, wait_until_listening
from .detection import find_job
from .rendezvous import Rendezvous, join_rendezvous
from .variables import UNKNOWN_RANK, Job, add_addresses


def initialize(
    job_addresses: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    initialization_timeout: int = 300,
    heartbeat_timeout_seconds: int = 100,
    shutdown_timeout_seconds: int = 300,
    run: str = "",
) -> None:
    """Connects this process to the others of the run; call it before JAX opens devices.

    Arguments that are None are read from the environment: SPMDKIT_*, KERAS_DISTRIBUTION_*, JAX_*, then the variables of
    Open MPI, PMI, Slurm or Kubernetes. Does nothing in a run of one process, or if called again. If nothing describes a
    run, JAX checks for a Cloud TPU.

    Args:
        job_addresses: Comma-separated "host:port" of every process, the coordinator first; or the coordinator alone.
        num_processes: The number of processes.
        process_id: The rank of this process; 0 is the coordinator.
        initialization_timeout: Seconds to wait for the other processes.
        heartbeat_timeout_seconds: Seconds after which a silent process counts as dead.
        shutdown_timeout_seconds: Seconds to wait for the others at exit.
        run: The run, such as its directory; a process with another value belongs to another run and is refused.

    Raises:
        UserError: The description of the run is incomplete, contradicting or invalid; the message names the variables.
        TooLateError: JAX has already opened its devices (also a RuntimeError).
        ProcessesMissing: Some ranks did not come within `initialization_timeout`.
        PortTaken: Another program listens at the coordinator's address.
    """
    if jax.distributed.is_initialized():
        return
    job = _find_job(job_addresses, num_processes, process_id)
    if job is not None and not job.is_shared:
        return
    if backend_started():
        raise TooLateError(
            "initialize() is too late: JAX has already opened its devices, so this process would train alone. "
            "Call it before any code that requests devices or creates an array (also in the modules that you import)."
        )
    timeouts = {
        "initialization_timeout": initialization_timeout,
        "heartbeat_timeout_seconds": heartbeat_timeout_seconds,
        "shutdown_timeout_seconds": shutdown_timeout_seconds,
    }
    if job is None:
        _initialize_tpu(timeouts)
        return
    note = {"own_ip": own_ip()}
    rendezvous = join_rendezvous(job, seconds=initialization_timeout, run=run, note=note, check=check_host_names)
    _connect_jax(job, rendezvous, timeouts)


def check_host_names(rendezvous: Rendezvous, *, on_cpu: bool | None = None) -> None:
    """Checks that CPU collectives can connect: Gloo listens on the address that the host's own name resolves to.

    Args:
        rendezvous: The processes of the run.
        on_cpu: True if they compute on the CPU; detected by default.

    Raises:
        UserError: A host's own name does not resolve, or resolves to loopback though there are several hosts.
    """
    if on_cpu is None:
        on_cpu = getattr(jax.config, "jax_platforms", None) == "cpu" or not has_accelerators()
    if not on_cpu:
        return
    several = len(set(rendezvous.hosts)) > 1
    for rank, (host, note) in enumerate(zip(rendezvous.hosts, rendezvous.notes, strict=True)):
        ip = str(note.get("own_ip", ""))
        if not ip or (several and is_loopback(ip)):
            raise UserError(
                f"Host {host} (rank {rank}) resolves its own name to {ip or 'nothing'}, but CPU collectives listen on "
                f"the address of that name. In its /etc/hosts, set the address that the others use for '{host}'."
            )


def _connect_jax(job: Job, rendezvous: Rendezvous, timeouts: dict[str, int]) -> None:
    assert job.address is not None
    bind = None if os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") else rendezvous.bind
    bypass_proxy(job.address.host)
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
    if num_processes is not None and num_processes < 1:
        raise UserError(f"num_processes={num_processes} must be at least 1.")
    if process_id is not None and process_id < 0:
        raise UserError(f"process_id={process_id} must be at least 0.")
    if job_addresses is None and num_processes is None and process_id is None:
        return find_job()
    names = {"address": "job_addresses"}
    rank = UNKNOWN_RANK if process_id is None else process_id
    given = Job("initialize()", num_processes=num_processes or 0, process_id=rank, variables=names)
    return find_job(given=add_addresses(given, job_addresses, "job_addresses") if job_addresses else given)


def _initialize_tpu(timeouts: dict[str, int]) -> None:
    """Lets JAX detect a Cloud TPU.

    Raises:
        UserError: This is not a Cloud TPU.
    """
    try:
        jax.distributed.initialize(**timeouts)  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        raise UserError(
            "initialize() found no other processes: it was called without addresses, and no variable describes a run "
            f"of several processes; JAX reports: {error} Set SPMDKIT_JOB_ADDRESSES, SPMDKIT_NUM_PROCESSES and "
            "SPMDKIT_PROCESS_ID, or remove the call from a run of one process."
        ) from error
