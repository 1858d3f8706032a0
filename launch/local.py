"""`spmdkit launch CONFIG --on local:2x4`: a run of several processes on this machine, over real collectives."""

import os
import re
import sys
from typing import NamedTuple

from ..configs import load_config
from ..mesh.errors import UserError
from ..mesh.joining.sources import without_job
from ..mesh.text import counted
from ..training.ending.exits import RELAYED
from ..training.worker import Job, job_environment
from .places import Run, not_a_target, shell_line
from .supervision.attempts import Attempt, run_attempts
from .supervision.bound import VARIABLE as BOUND
from .supervision.ports import free_port
from .supervision.workers import Start

MOST_PROCESSES, MOST_DEVICES = 256, 4096


class LocalTarget(NamedTuple):
    """Processes on this machine.

    Attributes:
        num_processes: How many, at least 1.
        devices: CPU devices that each of them simulates, at least 1.
    """

    num_processes: int
    devices: int

    def __str__(self) -> str:
        return f"local:{self.num_processes}x{self.devices}"


def parse(given: str) -> LocalTarget:
    """Reads "2x4".

    Raises:
        UserError: It is of another form, or more than a machine can run; the message says which form there is.
    """
    match = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", given)
    if match is None:
        raise not_a_target("local", given)
    target = LocalTarget(*(int(number[:20]) for number in match.groups()))
    if target.num_processes > MOST_PROCESSES or target.devices > MOST_DEVICES:
        raise UserError(
            f"--on {f'local:{given}'[:60]!r}: one machine runs at most {MOST_PROCESSES} processes of {MOST_DEVICES} "
            "simulated devices. Give fewer."
        )
    return target


def describe(run: Run, target: LocalTarget) -> str:
    """The command line of every process; PORT is a free one, taken anew for every attempt."""
    load_config(run.source, run.overrides, num_processes=target.num_processes, simulate=target.devices)
    jobs = [job_environment(_job("127.0.0.1:PORT", target, rank)) for rank in range(target.num_processes)]
    return "\n".join(shell_line(worker_command(run, run.fresh), job) for job in jobs)


def launch(run: Run, target: LocalTarget) -> int:
    """Trains in several processes; the numbers are those of one process with as many devices.

    Returns:
        The exit code of the process that ended the run: 0 finished, 2 a mistake in the config, 3 diverged, 75 stopped
        by a signal, so try again.
    """
    config = load_config(run.source, run.overrides, num_processes=target.num_processes, simulate=target.devices)

    def attempt(fresh: bool) -> Attempt:
        address = f"127.0.0.1:{free_port()}"
        command = worker_command(run, fresh)
        starts = [Start(command, worker_environment(address, target, rank)) for rank in range(target.num_processes)]
        return Attempt(
            starts,
            f"{counted(target.num_processes, 'process', 'processes')} x {counted(target.devices, 'simulated device')} "
            f"= {counted(target.num_processes * target.devices, 'device')}, coordinator {address}",
        )

    return run_attempts(config, attempt, fresh=run.fresh, restarts=run.restarts)


def worker_command(run: Run, fresh: bool) -> list[str]:
    """What every process of the run executes."""
    return [sys.executable, "-P", "-m", "spmdkit", *run.arguments, *(["--fresh"] if fresh else [])]


def worker_environment(address: str, target: LocalTarget, rank: int) -> dict[str, str]:
    """Returns the environment of one process of the run.

    Its coordinator is on this machine, so no proxy may stand between them. What it prints comes at once. It ends when
    this process does, which starts it.
    """
    environment = without_job(os.environ)
    if any(key.lower().endswith("_proxy") for key in environment):
        direct = ",".join(filter(None, (environment.get("no_proxy") or environment.get("NO_PROXY"), "127.0.0.1")))
        environment |= {"no_proxy": direct, "NO_PROXY": direct}
    output_and_end = {"PYTHONUNBUFFERED": "1", **RELAYED, BOUND: str(os.getpid())}
    return environment | job_environment(_job(address, target, rank)) | output_and_end


def _job(address: str, target: LocalTarget, rank: int) -> Job:
    return Job(address, target.num_processes, rank, target.devices)
