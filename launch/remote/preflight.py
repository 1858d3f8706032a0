"""Every host is asked at once, before anything starts: whether it answers, and has what the run needs.

What a host lacks is told with its name, all hosts together. A host that does not answer is replaced by a spare that
does.
"""

import hashlib
import json
import secrets
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from ...mesh.errors import UserError
from ..supervision.attempts import NotNow
from .client import message
from .connection import CONNECT_SECONDS, Refusal, refusal, ssh_command
from .hosts import Host, Hosts

ANSWER_SECONDS = CONNECT_SECONDS + 50.0
"""For a host to answer; Python on a slow shared file system takes long to start."""
AT_ONCE = 64
"""Hosts that are asked at a time."""
OLDEST_PYTHON = (3, 11)
PACKAGES = ("spmdkit", "jax", "jaxlib")
"""Whose versions have to be those of here."""


class HostUnavailable(NotNow):
    """A host does not answer, and no spare is left."""


class Wanted(NamedTuple):
    """What every host has to have.

    Attributes:
        config: File of the config as the command names it; None for a preset.
        run_dir: As in the config.
        gpus_per_process: As in the hosts file.
        simulate: Whether the processes simulate their devices.
        heartbeat: `timeouts.heartbeat`, seconds.
    """

    config: str | None
    run_dir: str
    gpus_per_process: int
    simulate: bool
    heartbeat: float


class Ready(NamedTuple):
    """Hosts on which a run may start.

    Attributes:
        hosts: By rank.
        spares: That are left.
        port: Nothing on the first host listens on it.
    """

    hosts: tuple[Host, ...]
    spares: tuple[Host, ...]
    port: int


Answer = Mapping[str, Any] | Refusal
"""What a host has, as `probe` of agent.py tells; or why it gave no answer."""
Answers = Mapping[tuple[str, int], Answer]
"""By the key of the host."""


def prepare(hosts: Hosts, wanted: Wanted, say: Callable[[str], None]) -> Ready:
    """Asks all hosts and spares, and chooses those on which the run starts.

    Args:
        hosts: The hosts file, complete with Python and folder of each host.
        wanted: What they have to have.
        say: Gets a line for each host that is replaced or left out.

    Raises:
        UserError: Hosts that will not do, whenever they are asked: all of them, each with all that it lacks.
        HostUnavailable: A host does not answer, and no spare does.
    """
    every = [*hosts.hosts, *hosts.spares]
    with beside(Path(wanted.run_dir)) as marker:
        answers = ask(hosts, every, _question(every, wanted, marker), wanted.heartbeat)
    chosen, spares, unanswered = choose(hosts.hosts, hosts.spares, answers, say)
    problems = _problems(every, chosen, answers, wanted)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise UserError("\n".join([f"{count} with the hosts of {hosts.source}:", *(f"  {each}" for each in problems)]))
    if unanswered:
        raise HostUnavailable("; ".join(unanswered))
    first = answers[chosen[0].key]
    if isinstance(first, Refusal) or first["port"] is None:
        raise HostUnavailable(f"host {chosen[0].name} has no free port for the coordinator")
    return Ready(chosen, spares, first["port"])


def _problems(every: Sequence[Host], chosen: Sequence[Host], answers: Answers, wanted: Wanted) -> list[str]:
    """What has to be corrected on all hosts and spares, each line after the name of the host."""
    first, problems = answers[chosen[0].key], []
    machines = {answer["machine"] for answer in answers.values() if not isinstance(answer, Refusal)}
    for host in every:
        answer = answers[host.key]
        if isinstance(answer, Refusal):
            lacks = [] if answer.passing else [f"{answer.message}."]
        else:
            lacks = [*shortcomings(host, answer, wanted)]
            if len(chosen) > 1 and not isinstance(first, Refusal):
                lacks += unreachable(chosen[0].reached_at, answer, first, several=len(machines) > 1)
        problems += [f"{host.name}: {each}" for each in lacks]
    return problems


def choose(
    hosts: Sequence[Host],
    spares: Sequence[Host],
    answers: Answers,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[tuple[Host, ...], tuple[Host, ...], list[str]]:
    """Puts spares that answer in the place of hosts that do not.

    Args:
        hosts: By rank.
        spares: In the order in which they are taken.
        answers: Of all of them.
        say: Gets a line for each host that is replaced.

    Returns:
        The hosts by rank, the spares that are left, and a line for each host that has no substitute.
    """
    left = list(spares)
    chosen, unanswered = [], []
    for host in hosts:
        answer = answers[host.key]
        if not isinstance(answer, Refusal) or not answer.passing:
            chosen.append(host)
            continue
        spare = next((each for each in left if not isinstance(answers[each.key], Refusal)), None)
        if spare is None:
            chosen.append(host)
            unanswered.append(f"host {host.name} {answer.message}")
            continue
        left.remove(spare)
        chosen.append(replace(spare, processes=host.processes))
        say(f"host {host.name} {answer.message}: {spare.name} takes its place")
    return tuple(chosen), tuple(left), unanswered


def ask(hosts: Hosts, every: Sequence[Host], question: Mapping[str, Any], heartbeat: float) -> Answers:
    """Asks hosts at once; returns their answers."""
    with ThreadPoolExecutor(min(AT_ONCE, len(every))) as pool:
        answers = pool.map(lambda host: _ask_one(hosts, host, question, heartbeat), every)
        return {host.key: answer for host, answer in zip(every, answers, strict=True)}


def _ask_one(hosts: Hosts, host: Host, question: Mapping[str, Any], heartbeat: float) -> Answer:
    token = secrets.token_hex(8)
    job = {**question, "do": "probe", "token": token, "directory": host.directory}
    command = ssh_command(hosts, host, heartbeat)
    try:
        ended = subprocess.run(command, input=message(job), capture_output=True, timeout=ANSWER_SECONDS, check=False)
    except FileNotFoundError:
        return Refusal("there is no ssh on this machine. Install OpenSSH's client")
    except subprocess.TimeoutExpired:
        return Refusal(f"does not answer within {ANSWER_SECONDS:.0f} s", passing=True)
    _, mark, answer = ended.stdout.decode(errors="replace").partition(f"spmdkit agent {token}\n")
    if mark and ended.returncode == 0:
        return json.loads(answer.splitlines()[0])
    return refusal(ended.returncode, ended.stderr.decode(errors="replace"), host.python)


def _question(every: Sequence[Host], wanted: Wanted, marker: Path) -> dict[str, Any]:
    addresses = sorted({host.reached_at for host in every})
    return {"config": wanted.config or "", "marker": str(marker), "addresses": addresses, "versions": PACKAGES}


def shortcomings(host: Host, answer: Mapping[str, Any], wanted: Wanted) -> Iterator[str]:
    """What a host lacks, with the remedies."""
    if tuple(answer["python"][:2]) < OLDEST_PYTHON:
        there = ".".join(map(str, answer["python"]))
        yield f"{host.python} is Python {there}; spmdkit needs 3.11 or newer. Set python in the hosts file."
        return
    if not answer["spmdkit"]:
        yield f"{host.python} has no spmdkit. Install it there, or set python in the hosts file to one that has it."
        return
    here = {name: installed(name) for name in PACKAGES}
    others = [name for name in PACKAGES if answer["versions"].get(name) != here[name]]
    for name in others:
        there = answer["versions"].get(name) or "none"
        yield f"it has {name} {there}, here is {here[name] or 'none'}. All hosts need the same; install it there."
    if answer["directory"] is None:
        yield f"there is no folder {host.directory} ({answer['reason']}). Set directory in the hosts file."
        return
    yield from _not_shared(answer, wanted)
    yield from _too_few_gpus(host, answer["gpus"], wanted)


def _not_shared(answer: Mapping[str, Any], wanted: Wanted) -> Iterator[str]:
    """What of the run is not on the host, or is something else there."""
    shared = "All hosts need the same file system under the same path; see directory in the hosts file"
    if wanted.config is not None and answer["config"] is None:
        yield f"the config {wanted.config} is not there, seen from {answer['directory']}. {shared}."
    elif wanted.config is not None and answer["config"] != sha256(Path(wanted.config)):
        yield f"the config {wanted.config} is another file there, seen from {answer['directory']}. {shared}."
    if not answer["marker"]:
        yield (
            f"run.dir {wanted.run_dir} is not the folder of this machine, seen from {answer['directory']}. {shared}, "
            "or set run.dir to a folder on it."
        )
    elif not answer["writable"]:
        yield f"run.dir {wanted.run_dir} may not be written there. Change its permissions, or set run.dir to another."


def _too_few_gpus(host: Host, gpus: int, wanted: Wanted) -> Iterator[str]:
    """Whether there are GPUs for all processes. A host that shows none of NVIDIA's may have others."""
    needed = host.processes * wanted.gpus_per_process
    if 0 < gpus < needed:
        yield (
            f"{host.processes} processes x {wanted.gpus_per_process} GPUs = {needed}, but it has {gpus}. Change "
            "processes or gpus_per_process in the hosts file."
        )
    elif not wanted.gpus_per_process and not wanted.simulate and gpus % host.processes:
        yield (
            f"its {gpus} GPUs cannot be divided among {host.processes} processes. Change processes in the hosts file, "
            "or give each some with gpus_per_process."
        )


def unreachable(address: str, answer: Mapping[str, Any], first: Mapping[str, Any], *, several: bool) -> list[str]:
    """Returns the reasons why a host cannot reach the first one, or the first one cannot be reached.

    Args:
        address: The coordinator's host.
        answer: The answer of the host.
        first: The answer of the first host.
        several: If the hosts of the file are several machines, not several names of one.
    """
    found = answer["addresses"].get(address)
    remedy = "Give the first host of the hosts file an address that all others can reach: {name: ..., address: ...}."
    if found is None:
        return [f"it does not know the name {address} of the first host. {remedy}"]
    if not several or not ip_address(found.partition("%")[0]).is_loopback:
        return []
    if answer["machine"] == first["machine"]:
        return [f"it resolves its own name {address} to {found}, where the other hosts cannot reach it. {remedy}"]
    return [f"it takes {address}, the first host, for itself ({found}). {remedy}"]


@contextmanager
def beside(run_dir: Path) -> Iterator[Path]:
    """Makes a file for a moment in the folder of a run, or in the nearest above it that exists.

    Args:
        run_dir: As in the config, relative or absolute.

    Yields:
        The file; relative where `run_dir` is.
    """
    folder = next((each for each in (run_dir, *run_dir.parents) if each.is_dir()), Path())
    path = folder / f".spmdkit-{secrets.token_hex(8)}"
    path.touch()
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """The digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def installed(package: str) -> str | None:
    """The version of a package here; None where it says none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
