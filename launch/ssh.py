"""`spmdkit launch CONFIG --on ssh:hosts.yaml`: a run on several hosts that are reached over SSH.

Every process has a client here and an agent there (remote/): for what watches processes it is a process of this
machine, with the same output, signals and exit status. The hosts share a file system; config and run.dir are on it.
"""

import json
import os
import secrets
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..configs import Config, load_config
from ..configs.secret_variables import resolve
from ..mesh.coordination import ranks
from ..mesh.errors import UserError
from ..mesh.files import absolute_path
from ..mesh.joining.sources import SET_BY_HAND
from ..training.ending.exits import RELAYED
from ..training.worker import Job, job_environment
from .places import Run, assignments, not_a_target
from .remote import client
from .remote.connection import quoted_path, ssh_command
from .remote.hosts import Host, Hosts, read_hosts
from .remote.preflight import Wanted, prepare
from .run.directory.folder import check_folder
from .supervision.attempts import Attempt, run_attempts, say
from .supervision.workers import Start

LEAST_SILENCE = 10.0
"""Seconds without a sign of life after which an agent ends its process, at least."""
APART_SECONDS = 0.05
"""Between the connections to one host: a server takes only so many at once."""
PORT = "PORT"
"""Stands for the port in what `--dry-run` prints: it is asked for when the run starts."""


class Slot(NamedTuple):
    """Where a process of the run goes.

    Attributes:
        rank: Which process.
        host: On which host.
        local: Which process of that host, from 0.
    """

    rank: int
    host: Host
    local: int


def parse(given: str) -> Hosts:
    """Reads the hosts file that is named.

    Raises:
        UserError: No file is named, or it is wrong; everything that is.
    """
    if not given:
        raise not_a_target("ssh", given, ": it names no file")
    return read_hosts(Path(given))


def describe(run: Run, target: Hosts) -> str:
    """The command line of every process after the host that it runs on; values that are forwarded are not shown."""
    config = load(run, target)
    hosts = complete(target, config)
    lines = []
    for slot in slots(hosts):
        named = [f'{name}="${name}"' for name in hosts.forward]
        given = assignments(variables_of(config, hosts, slot, PORT))
        words = [quoted_path(word) for word in with_setup(config, command(run, config, slot.host, run.fresh))]
        lines.append(f"# rank {slot.rank} on {slot.host.name}")
        lines.append(f"cd {quoted_path(slot.host.directory)} && {' '.join([*named, *given, *words])}")
    return "\n".join(lines)


def launch(run: Run, target: Hosts) -> int:
    """Trains on several hosts; the numbers are those of as many processes here.

    Returns:
        As `local`: 0 finished, 2 a mistake in the config, 3 diverged, 75 stopped by a signal or a host was lost, so try
        again.

    Raises:
        UserError: The config, the hosts file or a host will not do; nothing was started.
        HostUnavailable: A host does not answer, and no spare does.
    """
    config = load(run, target)
    hosts = complete(target, config)
    forwarded(hosts)
    resolve(config.launch.environment)
    check_folder(absolute_path(config.run.dir))
    wanted = Wanted(
        run.source if os.path.isfile(run.source) else None,
        config.run.dir,
        hosts.gpus_per_process,
        simulate=bool(hosts.simulate or config.run.simulate),
        heartbeat=config.timeouts.heartbeat,
    )
    ready = prepare(hosts, wanted, say)
    asked = True

    def attempt(fresh: bool) -> Attempt:
        nonlocal hosts, ready, asked
        if not asked:
            ready = prepare(hosts, wanted, say)
        asked = False
        hosts = replace(hosts, hosts=ready.hosts, spares=ready.spares)
        identity = secrets.token_hex(4)
        starts = [start(run, config, hosts, slot, ready.port, identity, fresh) for slot in slots(hosts)]
        return Attempt(starts, f"{describe_hosts(hosts)}, coordinator {coordinator(hosts)}:{ready.port}")

    return run_attempts(config, attempt, fresh=run.fresh, restarts=run.restarts)


def load(run: Run, hosts: Hosts) -> Config:
    """Reads the config for as many processes as the hosts run."""
    return load_config(run.source, run.overrides, num_processes=hosts.num_processes, simulate=hosts.simulate or None)


def complete(hosts: Hosts, config: Config) -> Hosts:
    """A hosts file in which every host says with which Python, and in which folder, its processes start."""
    python, directory = config.launch.python or sys.executable, os.getcwd()

    def completed(host: Host) -> Host:
        return replace(host, python=host.python or python, directory=host.directory or directory)

    return replace(hosts, hosts=tuple(map(completed, hosts.hosts)), spares=tuple(map(completed, hosts.spares)))


def slots(hosts: Hosts) -> Iterator[Slot]:
    """Every process of the run by rank; those of a host follow each other."""
    rank = 0
    for host in hosts.hosts:
        for local in range(host.processes):
            yield Slot(rank, host, local)
            rank += 1


def start(run: Run, config: Config, hosts: Hosts, slot: Slot, port: int, identity: str, fresh: bool) -> Start:
    """The process here that stands for one there; all of an attempt have one identity."""
    silence = max(LEAST_SILENCE, float(config.timeouts.heartbeat))
    job = {
        "do": "run",
        "token": secrets.token_hex(8),
        "command": with_setup(config, command(run, config, slot.host, fresh)),
        "directory": slot.host.directory,
        "environment": forwarded(hosts) | resolve(variables_of(config, hosts, slot, port, identity)) | RELAYED,
        "without": sorted(SET_BY_HAND),
        "direct": [coordinator(hosts)],
        "silence": silence,
        "delay": APART_SECONDS * slot.local,
    }
    ssh = ssh_command(hosts, slot.host, config.timeouts.heartbeat)
    return Start(
        [sys.executable, "-I", "-S", client.__file__, slot.host.name, *ssh],
        {**os.environ, client.VARIABLE: json.dumps(job)},
    )


def command(run: Run, config: Config, host: Host, fresh: bool) -> list[str]:
    """What a process of the run executes."""
    return [*config.launch.prefix, host.python, "-P", "-m", "spmdkit", *run.arguments, *(["--fresh"] if fresh else [])]


def with_setup(config: Config, words: list[str]) -> list[str]:
    """A command line that begins with the lines of `launch.setup`, where there are any."""
    if not config.launch.setup:
        return words
    return ["bash", "-e", "-c", "\n".join([*config.launch.setup, 'exec "$@"']), "bash", *words]


def variables_of(
    config: Config, hosts: Hosts, slot: Slot, port: int | str, identity: str = ""
) -> dict[str, str | None]:
    """The environment variables of one process, but for those that are forwarded.

    A process sees the GPUs that the hosts file gives it. Where it gives none, those of the host are divided among its
    processes when they join.
    """
    job = Job(f"{coordinator(hosts)}:{port}", hosts.num_processes, slot.rank, hosts.simulate or None, identity)
    given = {**config.launch.environment, **{name: str(value) for name, value in hosts.environment.items()}}
    each = hosts.gpus_per_process
    if each:
        gpus = range(slot.local * each, (slot.local + 1) * each)
        given = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), **given}
    else:
        job = job._replace(local_rank=slot.local, local_processes=slot.host.processes)
    return {**given, **job_environment(job), "PYTHONUNBUFFERED": "1"}


def forwarded(hosts: Hosts) -> dict[str, str]:
    """The environment variables that are forwarded, with their values here.

    Raises:
        UserError: Some are not set here.
    """
    missing = [name for name in hosts.forward if name not in os.environ]
    if missing:
        raise UserError(
            f"{hosts.source}: forward names {', '.join(missing)}, not set here. Set it, or take it out of the list."
        )
    return {name: os.environ[name] for name in hosts.forward}


def coordinator(hosts: Hosts) -> str:
    """Under which all processes reach the first; on one host that is the host itself."""
    first = hosts.hosts[0]
    return first.reached_at if len(hosts.hosts) > 1 or first.address else "127.0.0.1"


def describe_hosts(hosts: Hosts) -> str:
    """Which ranks run where, for people."""
    of_host = [(host.name, [slot.rank for slot in slots(hosts) if slot.host is host]) for host in hosts.hosts]
    return f"{hosts.num_processes} processes: " + ", ".join(f"{name} {ranks(numbers)}" for name, numbers in of_host)
