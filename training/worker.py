"""One process of a run of several: what the launcher tells it, how it joins the others and how it leaves them.

JAX alone ends badly here: a process that raises first waits for the others in an exit barrier while they wait for it in
a collective, until a timeout aborts all of them and buries the first error. So a process that fails says why and leaves
at once, and the launcher stops the others; a process that succeeds waits until all have, and the coordinator goes last.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from ..mesh.errors import UserError
from ..mesh.joining.detection import find_job
from ..mesh.joining.meeting import REFUSING_SECONDS
from ..mesh.joining.rendezvous import refuse
from ..mesh.processes import initialize, tell
from .ending.exits import report_error

LEAST_WRITING, A_WEEK = 1200, 604800
"""Seconds."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long the processes of a run wait for each other, in seconds."""

    rendezvous: int = 300
    """For all processes to join at the start."""
    heartbeat: int = 30
    """Without a sign of life from a process before it counts as dead."""
    shutdown: int = 120
    """For all processes to finish once the first has."""
    step: int = 1800
    """For a step, a batch of data or a save; where one takes longer the run ends, and the process that holds it up is
    named; 0 = never."""
    first_step: int = 0
    """The same for the first step of a process, in which devices connect; 0 = as `step`."""
    evaluation: int = 0
    """The same for a batch of an evaluation; 0 = as `step`."""
    save: int = 0
    """The same for a save, as far as training waits for it, and the least time that writing one in the background has;
    0 = as `step`."""
    stop: int = 120
    """After a signal, for the run to finish its step, save and end; then `spmdkit launch` kills what is left."""

    def __post_init__(self) -> None:
        problems = [
            f"timeouts.{name}={getattr(self, name)} must be at least 1 second."
            for name in ("rendezvous", "heartbeat", "shutdown", "stop")
            if getattr(self, name) < 1
        ]
        if self.step < 0:
            problems.append(f"timeouts.step={self.step} must be at least 1 second, or 0 to wait for ever.")
        problems += [
            f"timeouts.{name}={getattr(self, name)} must be at least 1 second, or 0 for that of timeouts.step."
            for name in ("first_step", "evaluation", "save")
            if getattr(self, name) < 0
        ]
        if problems:
            raise UserError("\n".join(problems))

    @property
    def writing(self) -> int:
        """Seconds that writing a checkpoint in the background may take: no less than training may wait for it."""
        return max(LEAST_WRITING, self.save or self.step or A_WEEK)


class Job(NamedTuple):
    """What the launcher tells a process about the run.

    Attributes:
        address: "host:port" of the coordinator, process 0.
        num_processes: Processes in the run.
        process_id: This one, 0 <= process_id < num_processes.
        simulate: CPU devices to simulate in this process; None = what the config says.
        identity: Of this attempt of this job: a process that has another is refused; "" = none is compared.
        local_rank: Which process of its host this is; None = not said.
        local_processes: How many there are on its host; None = not said. GPUs are divided among them by these two.
    """

    address: str
    num_processes: int
    process_id: int
    simulate: int | None
    identity: str = ""
    local_rank: int | None = None
    local_processes: int | None = None


def job_environment(job: Job) -> dict[str, str]:
    """Returns the environment variables that hand `job` to a process."""
    environment = {
        "SPMDKIT_JOB_ADDRESSES": job.address,
        "SPMDKIT_NUM_PROCESSES": str(job.num_processes),
        "SPMDKIT_PROCESS_ID": str(job.process_id),
    }
    further = {
        "SPMDKIT_SIMULATE": job.simulate,
        "SPMDKIT_JOB_ID": job.identity or None,
        "SPMDKIT_LOCAL_RANK": job.local_rank,
        "SPMDKIT_LOCAL_PROCESSES": job.local_processes,
    }
    return environment | {name: str(value) for name, value in further.items() if value is not None}


def one_of_several() -> bool:
    """Tells whether the environment says that this process is part of a run of several, be it half of what it takes."""
    try:
        job = find_job()
    except UserError:
        return True
    return job is not None and job.is_shared


def processes_in_job() -> int:
    """Returns how many processes the environment says the run has; 1 where it says nothing.

    Raises:
        UserError: It says half of what a process has to know about the others, or contradicts itself.
    """
    job = find_job()
    return job.num_processes if job else 1


def simulated_by_job() -> int | None:
    """Returns how many CPU devices the launcher wants this process to simulate; None where it says nothing."""
    return _number("SPMDKIT_SIMULATE") if os.environ.get("SPMDKIT_SIMULATE") else None


def _number(variable: str) -> int:
    text = os.environ[variable]
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"Environment variable {variable}={text!r} must be a whole number of at least 1.")
    return int(text)


@contextmanager
def starts_with_the_others() -> Iterator[None]:
    """Tells the other processes of the run if a UserError ends this one in a `with` block before it has joined them.

    Without that they would wait for it until `timeouts.rendezvous`. The error is raised again.
    """
    try:
        yield
    except UserError as error:
        job = None
        with suppress(UserError):  # it says half of what a process has to know: nobody can be reached
            job = find_job()
        if job is not None and job.is_shared and job.address is not None:
            tell(f"this process cannot start, and tells the others so (within {REFUSING_SECONDS:.0f} s)")
            refuse(job, str(error), say=lambda line: None)
        raise


@contextmanager
def multi_process(timeouts: Timeouts, run: str = "") -> Iterator[None]:
    """Joins the other processes of the run for the duration of a `with` block; does nothing in a run of one.

    Leaving the block normally waits, at most `timeouts.shutdown`, until every process has. An exception is printed and
    ends this process at once, without cleaning up: the others can no longer answer. Enter the block before anything
    touches a device, and do nothing that others wait for after it.

    Args:
        timeouts: How long to wait for the others.
        run: Folder of the run; a process of another run, at the same address by mistake, is refused.

    Raises:
        UserError: The environment says half of what a process has to know about the others.
    """
    if processes_in_job() == 1:
        yield
        return
    import jax

    # With JAX's service for preemption notices on, a process ignores SIGTERM until something asks for the notice.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        initialize(
            initialization_timeout=timeouts.rendezvous,
            heartbeat_timeout_seconds=timeouts.heartbeat,
            shutdown_timeout_seconds=timeouts.shutdown,
            run=run,
        )
        yield
        jax.distributed.shutdown()
    except BaseException as error:
        code = report_error(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
