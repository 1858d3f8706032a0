"""`spmdkit launch CONFIG --on local:2x4`: several processes on this machine, with real collectives."""

import os
import re
import sys
from typing import NamedTuple

from ..mesh.errors import counted
from ..mesh.known_causes import RELAYED
from .launchers import LaunchJob, LaunchRequest, invalid_target, shell_line
from .startup.variables import without_job_variables
from .startup.worker import job_environment
from .supervision.attempts import Attempt, run_attempts
from .supervision.lifetime import BOUND_VARIABLE, bound_to
from .supervision.workers import Start, free_port

MAX_PROCESSES, MAX_DEVICES = 256, 4096


class LocalTarget(NamedTuple):
    """Processes on this machine.

    Attributes:
        num_processes: The number of processes.
        devices: The number of CPU devices that each process simulates.
    """

    num_processes: int
    devices: int


def parse(given: str) -> LocalTarget:
    """Parses "2x4".

    Raises:
        UserError: The form is invalid, or the numbers are too large for one machine.
    """
    match = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", given, re.ASCII)
    if match is None:
        raise invalid_target("local", given)
    target = LocalTarget(*(int(number[:20]) for number in match.groups()))
    if target.num_processes > MAX_PROCESSES or target.devices > MAX_DEVICES:
        reason = f": at most {MAX_PROCESSES} processes with {MAX_DEVICES} simulated devices each"
        raise invalid_target("local", given, reason)
    return target


def describe(request: LaunchRequest, target: LocalTarget) -> str:
    """Returns the command line of every process; PORT stands for a free port, chosen anew for every attempt."""
    job = LaunchJob.load(request, num_processes=target.num_processes, simulate=target.devices)
    ranks = range(target.num_processes)
    environments = [job_environment("127.0.0.1:PORT", len(ranks), rank, simulate=target.devices) for rank in ranks]
    return "\n".join(shell_line(job.command(sys.executable, fresh=request.fresh), each) for each in environments)


def launch(request: LaunchRequest, target: LocalTarget) -> int:
    """Trains in several processes; the numbers are those of one process with as many devices.

    Returns:
        The exit code of the process that ended the run: 0 finished, 2 a mistake in the config, 3 diverged, 75 stopped
        by a signal, so try again.
    """
    job = LaunchJob.load(request, num_processes=target.num_processes, simulate=target.devices).with_copy()
    sizes = (
        f"{counted(target.num_processes, 'process', 'processes')} x {counted(target.devices, 'simulated device')} "
        f"= {counted(target.num_processes * target.devices, 'device')}"
    )

    def attempt(fresh: bool) -> Attempt:
        address = f"127.0.0.1:{free_port()}"
        command = job.command(sys.executable, fresh=fresh)
        starts = [Start(command, worker_environment(address, target, rank)) for rank in range(target.num_processes)]
        return Attempt(starts, f"{sizes}, coordinator {address}")

    return run_attempts(job, attempt)


def worker_environment(address: str, target: LocalTarget, rank: int) -> dict[str, str]:
    """Returns the environment of one process; its output is not buffered, and it ends when this process ends."""
    own = {"PYTHONUNBUFFERED": "1", **RELAYED, BOUND_VARIABLE: bound_to(os.getpid())}
    job = job_environment(address, target.num_processes, rank, simulate=target.devices)
    return without_job_variables(os.environ) | job | own
