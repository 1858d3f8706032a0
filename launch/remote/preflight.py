"""Asks every host, before anything starts, if it is reachable and has what the run needs.

The problems of all hosts are reported together.
"""

import json
import re
import secrets
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ...mesh.errors import UserError, counted
from ..doctor.job_checks import create_marker
from ..launchers import LaunchJob
from ..startup.addresses import Address, is_loopback
from ..supervision.attempts import NotNow
from .client import message
from .hosts import Host, Hosts

CONNECT_SECONDS = 10
ANSWER_SECONDS = CONNECT_SECONDS + 50.0
"""The time for a host to answer; Python on a slow shared file system takes long to start."""
MAX_CONNECTIONS = 64
MIN_PYTHON = (3, 11)
BOOTSTRAP = (
    "import sys; sys.path = [each for each in sys.path if each]; "
    'exec(compile(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())), "agent", "exec"))'
)
"""The program of Python on a host: it reads the text of agent.py from stdin, and imports nothing from its directory."""
SSH_FAILED = 255
"""The exit code of ssh if ssh itself failed."""
MISTAKES = re.compile(
    "Could not resolve hostname|Host key verification failed|Permission denied|Bad configuration option|unknown option"
    "|Bad owner or permissions"
)
"""Errors of ssh for which another attempt would fail too."""


Answer = Mapping[str, Any] | UserError | NotNow
"""The result of `probe` in agent.py, or the reason why the host cannot take part, now or at all."""


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


def explain_failure(code: int, stderr: str, host: Host) -> UserError | NotNow:
    """Explains why no agent answered.

    Args:
        code: The exit code of ssh.
        stderr: The stderr of ssh.
        host: The host.
    """
    last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "no message")
    if code != SSH_FAILED:
        return UserError(
            f"{host.python} cannot run there (exit code {code}: {last}). Set python in the hosts file to a Python that "
            "has spmdkit."
        )
    if MISTAKES.search(stderr):
        return UserError(f"ssh cannot log in ({last}). Correct it until `ssh {host.name}` logs in without a question.")
    return NotNow(f"does not answer ({last})")


def check_hosts(hosts: Hosts, job: LaunchJob) -> int:
    """Checks that all hosts can take part in a run.

    Args:
        hosts: The hosts file, with Python and directory of each host.
        job: The run to launch.

    Returns:
        A free port on the first host.

    Raises:
        UserError: Some hosts cannot be used; the message lists all of them with all problems.
        NotNow: A host does not answer.
    """
    with create_marker(Path(job.run_dir)) as marker:
        answers = ask(hosts, job, marker)
    problems, unanswered = [], []
    for host, answer in zip(hosts.hosts, answers, strict=True):
        if isinstance(answer, NotNow):
            unanswered.append(f"host {host.name} {answer}")
        else:
            found = [answer] if isinstance(answer, UserError) else check_host(host, answer, hosts, job)
            problems += [f"{host.name}: {each}" for each in found]
    if problems:
        count = counted(len(problems), "problem")
        raise UserError("\n".join([f"{count} with the hosts of {hosts.source}:", *(f"  {each}" for each in problems)]))
    if unanswered:
        raise NotNow("; ".join(unanswered))
    assert isinstance(answers[0], Mapping)
    return answers[0]["port"]


def ask(hosts: Hosts, job: LaunchJob, marker: Path) -> list[Answer]:
    """Asks all hosts at the same time; returns their answers in order.

    Args:
        hosts: The hosts file.
        job: The run to launch.
        marker: A new file in run.dir, which all hosts must see.
    """
    question = {"do": "probe", "marker": str(marker), "addresses": sorted({host.reached_at for host in hosts.hosts})}

    def ask_one(host: Host) -> Answer:
        token = secrets.token_hex(8)
        task = {**question, "token": token, "directory": host.directory}
        command = ssh_command(hosts, host, job.timeouts.heartbeat)
        try:
            ended = subprocess.run(command, input=message(task), capture_output=True, timeout=ANSWER_SECONDS)
        except FileNotFoundError:
            return UserError("ssh is not installed on this machine. Install OpenSSH's client.")
        except subprocess.TimeoutExpired:
            return NotNow(f"does not answer within {ANSWER_SECONDS:.0f} s")
        _, mark, answer = ended.stdout.decode(errors="replace").partition(f"spmdkit agent {token}\n")
        if mark and ended.returncode == 0:
            return json.loads(answer.splitlines()[0])
        return explain_failure(ended.returncode, ended.stderr.decode(errors="replace"), host)

    with ThreadPoolExecutor(min(MAX_CONNECTIONS, len(hosts.hosts))) as pool:
        return list(pool.map(ask_one, hosts.hosts))


def check_host(host: Host, answer: Mapping[str, Any], hosts: Hosts, job: LaunchJob) -> Iterator[str]:
    """Yields the requirements that a host does not meet, with the fixes."""
    if len(hosts.hosts) > 1:
        yield from _check_coordinator(hosts.hosts[0].reached_at, answer)
    if tuple(answer["python"][:2]) < MIN_PYTHON:
        found = ".".join(map(str, answer["python"]))
        yield f"{host.python} is Python {found}; spmdkit needs 3.11 or newer. Set python in the hosts file."
        return
    if not answer["spmdkit"]:
        yield f"{host.python} lacks spmdkit. Install it there, or set python in the hosts file to one that has it."
        return
    if answer["directory"] is None:
        yield f"missing directory {host.directory} ({answer['reason']}). Set directory in the hosts file."
        return
    if not answer["marker"]:
        yield (
            f"run.dir {job.run_dir} is not the directory of this machine, relative to {answer['directory']}. All hosts "
            "need the same file system under the same path; see directory in the hosts file, or set run.dir to a "
            "directory on it."
        )
    if 0 < answer["gpus"] < (needed := host.processes * hosts.gpus_per_process):  # a host may have other GPUs
        yield (
            f"{host.processes} processes x {hosts.gpus_per_process} GPUs = {needed}, but it has {answer['gpus']}. "
            "Change processes or gpus_per_process in the hosts file."
        )


def _check_coordinator(address: str, answer: Mapping[str, Any]) -> Iterator[str]:
    """Yields the reason why a host cannot reach the first one.

    Args:
        address: The address of the first host; a loopback address if all hosts are one machine.
        answer: The answer of the host.
    """
    found = answer["addresses"].get(address)
    if not found or (is_loopback(found) and not Address(address, 0).is_loopback):
        yield (
            f"it resolves {address}, the first host, to {found or 'nothing'}. Set an address of the first host in the "
            "hosts file that all others can reach: {name: ..., address: ...}."
        )
