"""`spmdkit launch CONFIG --on ssh:hosts.yaml`: several hosts that are reached over SSH.

Every process has a client here and an agent there (remote/): for the supervision it is a process of this machine, with
the same output, signals and exit status. The hosts share a file system, which contains the config and run.dir.
"""

import json
import os
import secrets
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..configs.secret_variables import resolve
from ..mesh.known_causes import RELAYED
from ..mesh.processes import ranks
from .launchers import LaunchJob, LaunchRequest, assignments, invalid_target
from .remote import client
from .remote.hosts import Host, Hosts, list_hosts, read_hosts
from .remote.preflight import check_hosts, quote_path, ssh_command
from .startup.worker import job_environment
from .supervision.attempts import Attempt, run_attempts
from .supervision.workers import Start

MIN_SILENCE_SECONDS = 10.0
"""The minimum time without a message after which an agent ends its process."""
DELAY_SECONDS = 0.05
"""The delay between connections to one host: a server accepts only a few at a time."""


class Slot(NamedTuple):
    """The place of one process of the run.

    Attributes:
        rank: The rank of the process.
        host: The host.
        local: The index of the process on that host, from 0.
    """

    rank: int
    host: Host
    local: int


def parse(given: str) -> Hosts:
    """Reads a hosts file, or host names with commas between them.

    Raises:
        UserError: The file is missing or invalid; the message lists all problems.
    """
    if "," in given and not Path(given).exists():
        return list_hosts(given)
    if not given:
        raise invalid_target("ssh", given, ": the file is missing")
    return read_hosts(Path(given))


def describe(request: LaunchRequest, target: Hosts) -> str:
    """Returns the command line of every process after its host."""
    job, hosts = load(request, target)
    lines = []
    for slot in list_slots(hosts):
        given = assignments(slot_variables(job, hosts, slot, "PORT"))
        words = map(quote_path, build_command(job, slot.host, request.fresh))
        lines.append(f"# rank {slot.rank} on {slot.host.name}")
        lines.append(f"cd {quote_path(slot.host.directory)} && {' '.join([*given, *words])}")
    return "\n".join(lines)


def launch(request: LaunchRequest, target: Hosts) -> int:
    """Trains on several hosts; the numbers are those of as many processes on this machine.

    Returns:
        The exit code: 0 finished, 2 a mistake in the config, 3 diverged, 75 stopped by a signal, or a host was lost or
        does not answer, so try again.

    Raises:
        UserError: The config, the hosts file or a host is not usable; nothing was started.
    """
    job, hosts = load(request, target)
    job = job.with_copy()
    resolve(job.launch.environment)

    def attempt(fresh: bool) -> Attempt:
        port = check_hosts(hosts, job)
        identity = secrets.token_hex(4)
        starts = [build_start(job, hosts, slot, port, identity, fresh) for slot in list_slots(hosts)]
        return Attempt(starts, f"{describe_hosts(hosts)}, coordinator {coordinator_host(hosts)}:{port}")

    return run_attempts(job, attempt)


def load(request: LaunchRequest, hosts: Hosts) -> tuple[LaunchJob, Hosts]:
    """Reads the config, and fills in the default Python and directory of each host."""
    job = LaunchJob.load(request, num_processes=hosts.num_processes)
    python = hosts.python or job.launch.python or sys.executable
    directory = hosts.directory or os.getcwd()
    complete = (
        replace(host, python=host.python or python, directory=host.directory or directory) for host in hosts.hosts
    )
    return job, replace(hosts, hosts=tuple(complete))


def list_slots(hosts: Hosts) -> list[Slot]:
    """Returns the places of all processes by rank; those of a host are consecutive."""
    places = [(host, local) for host in hosts.hosts for local in range(host.processes)]
    return [Slot(rank, host, local) for rank, (host, local) in enumerate(places)]


def build_start(job: LaunchJob, hosts: Hosts, slot: Slot, port: int, identity: str, fresh: bool) -> Start:
    """Returns the client process for one remote process; all of an attempt have the same identity."""
    task = {
        "do": "run",
        "token": secrets.token_hex(8),
        "command": build_command(job, slot.host, fresh),
        "directory": slot.host.directory,
        "environment": resolve(slot_variables(job, hosts, slot, port, identity)) | RELAYED,
        "silence": max(MIN_SILENCE_SECONDS, float(job.timeouts.heartbeat)),
        "delay": DELAY_SECONDS * slot.local,
    }
    ssh = ssh_command(hosts, slot.host, job.timeouts.heartbeat)
    return Start(
        [sys.executable, "-I", "-S", client.__file__, slot.host.name, *ssh],
        {**os.environ, client.VARIABLE: json.dumps(task)},
        is_rank=False,
    )


def build_command(job: LaunchJob, host: Host, fresh: bool) -> list[str]:
    """Returns the command line of a process, after the lines of `launch.setup`."""
    return job.run_setup([*job.launch.prefix, *job.command(host.python, fresh=fresh)], "-e")


def slot_variables(
    job: LaunchJob, hosts: Hosts, slot: Slot, port: int | str, identity: str = ""
) -> dict[str, str | None]:
    """Returns the environment variables of one process; None = the value on this machine.

    A process sees the GPUs that the hosts file gives it. If it gives none, the GPUs of the host are divided among its
    processes when they join the run.
    """
    given = job.launch.environment
    if each := hosts.gpus_per_process:
        gpus = range(slot.local * each, (slot.local + 1) * each)
        given = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), **given}
    own: dict[str, Any] = {"identity": identity} if identity else {}
    own |= {} if each else {"local_rank": slot.local, "local_processes": slot.host.processes}
    job_variables = job_environment(f"{coordinator_host(hosts)}:{port}", hosts.num_processes, slot.rank, **own)
    return {**given, **job_variables, "PYTHONUNBUFFERED": "1"}


def coordinator_host(hosts: Hosts) -> str:
    """Returns the address of the first host for all processes; 127.0.0.1 if there is only one host."""
    first = hosts.hosts[0]
    return first.reached_at if len(hosts.hosts) > 1 or first.address else "127.0.0.1"


def describe_hosts(hosts: Hosts) -> str:
    """Returns the ranks of each host, for people."""
    by_host = [(host.name, [slot.rank for slot in list_slots(hosts) if slot.host is host]) for host in hosts.hosts]
    return f"{hosts.num_processes} processes: " + ", ".join(f"{name} {ranks(numbers)}" for name, numbers in by_host)
