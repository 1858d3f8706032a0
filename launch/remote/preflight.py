"""Asks every host, before anything starts, if it is reachable and has what the run needs.

The problems of all hosts are reported together. A host that does not answer is replaced by a spare that does.
"""

import hashlib
import json
import secrets
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from ...mesh.errors import UserError, counted
from ..supervision.attempts import NotNow
from ..supervision.output import announce
from .client import message
from .hosts import Host, Hosts

CONNECT_SECONDS = 10
ANSWER_SECONDS = CONNECT_SECONDS + 50.0
"""The time for a host to answer; Python on a slow shared file system takes long to start."""
MAX_CONNECTIONS = 64
MIN_PYTHON = (3, 11)
PACKAGES = ("spmdkit", "jax", "jaxlib")
"""The packages whose versions must be the same on all hosts."""
BOOTSTRAP = (
    "import sys; sys.path = [each for each in sys.path if each]; "
    'exec(compile(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())), "agent", "exec"))'
)
"""The program of Python on a host: it reads the text of agent.py from stdin, and imports nothing from its directory."""
SSH_FAILED = 255
"""The exit code of ssh if ssh itself failed."""
NOT_FOUND = (126, 127)
"""The exit codes of a shell that cannot start a command."""
PYTHON_HINT = "Set python in the hosts file to a Python that has spmdkit."
MISTAKES = {
    "Could not resolve hostname": "its name cannot be resolved. Correct it in the hosts file, or in ~/.ssh/config",
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "its key has changed. Make sure that it is the right host, then remove "
    "the old key with ssh-keygen -R",
    "Host key verification failed": "its key is unknown. Connect once by hand and accept it: under a launcher, ssh "
    "does not ask",
    "Permission denied": "it refuses the login. Add your public key to ~/.ssh/authorized_keys there, unlock the "
    "private key with ssh-agent, or correct the user's name in the hosts file",
    "Bad configuration option": "ssh rejects one of its options. Correct ssh in the hosts file",
    "unknown option": "ssh rejects one of its options. Correct ssh in the hosts file",
    "Bad owner or permissions": "ssh rejects its own configuration. Correct the permissions of the file",
    "UNPROTECTED PRIVATE KEY": "others can read the private key, so ssh does not use it. Run chmod 600 on it",
}
"""Errors of ssh for which another attempt would fail too -> the fix."""


class HostUnavailable(NotNow):
    """A host does not answer, and no spare host is left."""


class Refusal(NamedTuple):
    """The reason why a host cannot take part.

    Attributes:
        message: The problem and the fix.
        is_temporary: If the same command may work later.
    """

    message: str
    is_temporary: bool = False


class Requirements(NamedTuple):
    """The requirements of a run that every host must meet.

    Attributes:
        config: The path of the config as given on the command line; None for a preset.
        run_dir: run.dir of the config.
        gpus_per_process: The key of the hosts file.
        simulate: If the processes simulate their devices.
        heartbeat: timeouts.heartbeat, in seconds.
    """

    config: str | None
    run_dir: str
    gpus_per_process: int
    simulate: bool
    heartbeat: float


class SelectedHosts(NamedTuple):
    """The hosts on which a run starts.

    Attributes:
        hosts: The hosts by rank.
        spares: The remaining spare hosts.
        port: A free port on the first host.
    """

    hosts: tuple[Host, ...]
    spares: tuple[Host, ...]
    port: int


Answer = Mapping[str, Any] | Refusal
"""The result of `probe` in agent.py, or the reason why there is none."""
Answers = Mapping[tuple[str, int], Answer]
"""By the key of the host."""


def ssh_command(hosts: Hosts, host: Host, heartbeat: float) -> list[str]:
    """Returns the command line that runs an agent on a host.

    Options of the hosts file come first, because ssh uses the first of two values. An existing shared connection (as
    after a login with a second factor) is used, but none is opened: all others would end with it.

    Args:
        hosts: The hosts file.
        host: One of its hosts.
        heartbeat: Seconds without a message after which the others count a process as dead. ssh gives up earlier, after
            three intervals without an answer.
    """
    settings = {
        "BatchMode": "yes",
        "ConnectTimeout": CONNECT_SECONDS,
        "ServerAliveInterval": max(1, int(heartbeat / 6)),
        "ServerAliveCountMax": 3,
        "ControlMaster": "no",
        "ForwardX11": "no",
        "ClearAllForwardings": "yes",
    }
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    port = ["-p", str(host.port)] if host.port else []
    agent = f"exec {quote_path(host.python)} -c {shlex.quote(BOOTSTRAP)}"
    return ["ssh", *hosts.ssh, "-T", *options, *port, "--", host.name, agent]


def quote_path(path: str) -> str:
    """Quotes a path for a shell, which still expands `~/` at its beginning."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)


def explain_failure(code: int, stderr: str, python: str) -> Refusal:
    """Explains why no agent answered.

    Args:
        code: The exit code of ssh.
        stderr: The stderr of ssh.
        python: The interpreter on the host.
    """
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else "no message"
    if code in NOT_FOUND:
        return Refusal(f"there is no {python} ({last}). Set python in the hosts file to an existing interpreter.")
    if code != SSH_FAILED:
        return Refusal(f"{python} cannot run there: it ended with exit code {code}: {last}. {PYTHON_HINT}")
    for words, fix in MISTAKES.items():
        if words in stderr:
            return Refusal(f"{fix} ({last})")
    return Refusal(f"does not answer ({last})", is_temporary=True)


def select_hosts(hosts: Hosts, required: Requirements) -> SelectedHosts:
    """Asks all hosts and spares, and selects those on which the run starts.

    Args:
        hosts: The hosts file, with Python and directory of each host.
        required: The requirements of the run.

    Raises:
        UserError: Some hosts cannot be used; the message lists all of them with all problems.
        HostUnavailable: A host does not answer, and no spare does.
    """
    every = [*hosts.hosts, *hosts.spares]
    with create_marker(Path(required.run_dir)) as marker:
        answers = ask(hosts, every, _question(every, required, marker), required.heartbeat)
    selected, spares, unanswered = replace_hosts(hosts.hosts, hosts.spares, answers)
    if problems := list_problems(every, selected, answers, required):
        count = counted(len(problems), "problem")
        raise UserError("\n".join([f"{count} with the hosts of {hosts.source}:", *(f"  {each}" for each in problems)]))
    if unanswered:
        raise HostUnavailable("; ".join(unanswered))
    first = answers[selected[0].key]
    if isinstance(first, Refusal) or first["port"] is None:
        raise HostUnavailable(f"host {selected[0].name} lacks a free port for the coordinator")
    return SelectedHosts(selected, spares, first["port"])


def list_problems(
    every: Sequence[Host], selected: Sequence[Host], answers: Answers, required: Requirements
) -> list[str]:
    """Returns the problems of all hosts and spares, each after the name of the host."""
    first, problems = answers[selected[0].key], []
    machines = {answer["machine"] for answer in answers.values() if not isinstance(answer, Refusal)}
    for host in every:
        answer = answers[host.key]
        if isinstance(answer, Refusal):
            found = [] if answer.is_temporary else [f"{answer.message}."]
        else:
            found = [*check_host(host, answer, required)]
            if len(selected) > 1 and not isinstance(first, Refusal):
                found += check_coordinator(selected[0].reached_at, answer, first, several=len(machines) > 1)
        problems += [f"{host.name}: {each}" for each in found]
    return problems


def replace_hosts(
    hosts: Sequence[Host], spares: Sequence[Host], answers: Answers
) -> tuple[tuple[Host, ...], tuple[Host, ...], list[str]]:
    """Replaces hosts that do not answer with spares that do.

    Args:
        hosts: The hosts by rank.
        spares: The spares in order.
        answers: The answers of all of them.

    Returns:
        The hosts by rank, the remaining spares, and a line for each host without a replacement.
    """
    left = list(spares)
    selected, unanswered = [], []
    for host in hosts:
        answer = answers[host.key]
        if not isinstance(answer, Refusal) or not answer.is_temporary:
            selected.append(host)
            continue
        spare = next((each for each in left if not isinstance(answers[each.key], Refusal)), None)
        if spare is None:
            selected.append(host)
            unanswered.append(f"host {host.name} {answer.message}")
            continue
        left.remove(spare)
        selected.append(replace(spare, processes=host.processes))
        announce(f"host {host.name} {answer.message}: {spare.name} replaces it")
    return tuple(selected), tuple(left), unanswered


def ask(hosts: Hosts, every: Sequence[Host], question: Mapping[str, Any], heartbeat: float) -> Answers:
    """Asks several hosts at the same time; returns their answers."""
    with ThreadPoolExecutor(min(MAX_CONNECTIONS, len(every))) as pool:
        answers = pool.map(lambda host: _ask_one(hosts, host, question, heartbeat), every)
        return {host.key: answer for host, answer in zip(every, answers, strict=True)}


def _ask_one(hosts: Hosts, host: Host, question: Mapping[str, Any], heartbeat: float) -> Answer:
    token = secrets.token_hex(8)
    task = {**question, "do": "probe", "token": token, "directory": host.directory}
    command = ssh_command(hosts, host, heartbeat)
    try:
        ended = subprocess.run(command, input=message(task), capture_output=True, timeout=ANSWER_SECONDS)
    except FileNotFoundError:
        return Refusal("ssh is not installed on this machine. Install OpenSSH's client")
    except subprocess.TimeoutExpired:
        return Refusal(f"does not answer within {ANSWER_SECONDS:.0f} s", is_temporary=True)
    _, mark, answer = ended.stdout.decode(errors="replace").partition(f"spmdkit agent {token}\n")
    if mark and ended.returncode == 0:
        return json.loads(answer.splitlines()[0])
    return explain_failure(ended.returncode, ended.stderr.decode(errors="replace"), host.python)


def _question(every: Sequence[Host], required: Requirements, marker: Path) -> dict[str, Any]:
    addresses = sorted({host.reached_at for host in every})
    return {"config": required.config or "", "marker": str(marker), "addresses": addresses, "versions": PACKAGES}


def check_host(host: Host, answer: Mapping[str, Any], required: Requirements) -> Iterator[str]:
    """Yields the requirements that a host does not meet, with the fixes."""
    if tuple(answer["python"][:2]) < MIN_PYTHON:
        found = ".".join(map(str, answer["python"]))
        yield f"{host.python} is Python {found}; spmdkit needs 3.11 or newer. Set python in the hosts file."
        return
    if not answer["spmdkit"]:
        yield f"{host.python} lacks spmdkit. Install it there, or set python in the hosts file to one that has it."
        return
    for name in PACKAGES:
        there, here = answer["versions"].get(name), installed_version(name)
        if there != here:
            yield (
                f"{name} is {there or 'missing'} there and {here or 'missing'} here. All hosts need the same version; "
                "install it there."
            )
    if answer["directory"] is None:
        yield f"missing directory {host.directory} ({answer['reason']}). Set directory in the hosts file."
        return
    yield from _check_shared(answer, required)
    yield from _check_gpus(host, answer["gpus"], required)


def _check_shared(answer: Mapping[str, Any], required: Requirements) -> Iterator[str]:
    """Yields the files and directories of the run that are missing or different on a host."""
    shared = "All hosts need the same file system under the same path; see directory in the hosts file"
    config, directory = required.config, answer["directory"]
    if config is not None and answer["config"] is None:
        yield f"the config {config} is missing there, relative to {directory}. {shared}."
    elif config is not None and answer["config"] != hashlib.sha256(Path(config).read_bytes()).hexdigest():
        yield f"the config {config} is a different file there, relative to {directory}. {shared}."
    if not answer["marker"]:
        yield (
            f"run.dir {required.run_dir} is not the directory of this machine, relative to {directory}. {shared}, or "
            "set run.dir to a directory on it."
        )
    elif not answer["writable"]:
        yield f"run.dir {required.run_dir} is not writable there. Change its permissions, or set another run.dir."


def _check_gpus(host: Host, gpus: int, required: Requirements) -> Iterator[str]:
    """Yields a problem if the GPUs do not suffice. A host without NVIDIA GPUs may have others."""
    needed = host.processes * required.gpus_per_process
    if 0 < gpus < needed:
        yield (
            f"{host.processes} processes x {required.gpus_per_process} GPUs = {needed}, but it has {gpus}. Change "
            "processes or gpus_per_process in the hosts file."
        )
    elif not required.gpus_per_process and not required.simulate and gpus % host.processes:
        yield (
            f"its {gpus} GPUs cannot be divided among {host.processes} processes. Change processes in the hosts file, "
            "or set gpus_per_process."
        )


def check_coordinator(address: str, answer: Mapping[str, Any], first: Mapping[str, Any], *, several: bool) -> list[str]:
    """Returns the reasons why a host cannot reach the first one, or why the first one cannot be reached.

    Args:
        address: The host of the coordinator.
        answer: The answer of the host.
        first: The answer of the first host.
        several: If the hosts of the file are several machines, not several names of one.
    """
    found = answer["addresses"].get(address)
    fix = "Set an address of the first host in the hosts file that all others can reach: {name: ..., address: ...}."
    if found is None:
        return [f"it cannot resolve the name {address} of the first host. {fix}"]
    if not several or not ip_address(found.partition("%")[0]).is_loopback:
        return []
    if answer["machine"] == first["machine"]:
        return [f"it resolves its own name {address} to {found}, which the other hosts cannot reach. {fix}"]
    return [f"it resolves {address}, the first host, to itself ({found}). {fix}"]


@contextmanager
def create_marker(run_dir: Path) -> Iterator[Path]:
    """Creates a temporary file in the directory of a run, or in its nearest existing parent.

    Args:
        run_dir: run.dir, relative or absolute.

    Yields:
        The path of the file; relative if `run_dir` is.
    """
    directory = next((each for each in (run_dir, *run_dir.parents) if each.is_dir()), Path())
    path = directory / f".spmdkit-{secrets.token_hex(8)}"
    path.touch()
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def installed_version(package: str) -> str | None:
    """Returns the version of a package on this machine; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
