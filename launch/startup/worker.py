"""One process of a run of several: the variables that the launcher sets, joining the other processes, and leaving them.

JAX alone ends badly: a process that raises waits for the others in an exit barrier while they wait for it in a
collective, until a timeout aborts all of them and hides the first error. So a process that fails prints its error and
exits at once, and the launcher stops the others. A process that succeeds waits until all have. The coordinator exits
last.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ...configs.schema import Timeouts
from ...mesh.errors import UserError
from ...mesh.known_causes import report_error
from ...mesh.processes import print_progress
from .detection import find_job
from .initialize import initialize
from .rendezvous import REFUSING_SECONDS, announce_failure
from .variables import MANUAL, read_integer


def job_environment(
    address: str, num_processes: int, process_id: int, *, simulate: int = 0, **more: Any
) -> dict[str, str]:
    """Returns the environment variables that describe a job to one of its processes; `find_job` reads them.

    Args:
        address: "host:port" of the coordinator, process 0.
        num_processes: The number of processes.
        process_id: The rank of the process.
        simulate: The number of CPU devices that the process simulates; 0 = the config's value.
        **more: Further values of a `Job`: `identity`, `local_rank`, `local_processes`.
    """
    facts = {"address": address, "num_processes": num_processes, "process_id": process_id, **more}
    variables = {MANUAL["SPMDKIT_*"][fact][0]: str(value) for fact, value in facts.items()}
    return variables | ({"SPMDKIT_SIMULATE": str(simulate)} if simulate else {})


def count_processes() -> int:
    """Returns the number of processes of the run, 1 by default.

    Raises:
        UserError: The environment describes the run incompletely or contradicts itself.
    """
    job = find_job()
    return job.num_processes if job else 1


def count_simulated() -> int | None:
    """Returns the number of CPU devices that the launcher makes this process simulate, if any."""
    return read_integer(os.environ, "SPMDKIT_SIMULATE", 1)


@contextmanager
def announces_errors() -> Iterator[None]:
    """Notifies the other processes of the run if a UserError ends this one in a `with` block before it has joined them.

    Otherwise they would wait for it until `timeouts.rendezvous`. The error is raised again.
    """
    try:
        yield
    except UserError as error:
        with suppress(UserError):  # incomplete variables: the others cannot be reached
            job = find_job()
            if job is not None and job.is_shared and job.address is not None:
                print_progress(f"this process cannot start and notifies the others (within {REFUSING_SECONDS:.0f} s)")
                announce_failure(job, str(error), say=lambda line: None)
        raise


@contextmanager
def joins_processes(timeouts: Timeouts, run: str = "") -> Iterator[None]:
    """Joins the other processes of the run for the duration of a `with` block; does nothing in a run of one.

    Leaving the block normally waits, at most `timeouts.shutdown`, until every process does. An exception is printed and
    ends this process at once, without cleanup: the others can no longer answer. Enter the block before any code opens a
    device, and do nothing after it that others wait for.

    Args:
        timeouts: The timeouts of the run.
        run: The directory of the run; a process of another run at the same address is refused.

    Raises:
        UserError: The environment describes the run incompletely.
    """
    if count_processes() == 1:
        yield
        return
    import jax

    # With JAX's service for preemption notices, a process would ignore SIGTERM until it requests the notice.
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
