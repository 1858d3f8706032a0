"""The hosts file of `--on ssh:hosts.yaml`: the hosts and the number of processes on each.

    hosts: [gpu1, gpu2]
    gpus_per_process: 1
    processes: 8

A list of names is enough, in YAML or as plain lines, such as those of an MPI hostfile:

    gpu1 slots=8
    gpu2 slots=8

All problems of a file are reported at once, as for a config.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le

from ...configs.config_errors import ConfigError, Problem, config_error
from ...configs.launch_config import Count
from ...configs.validation import to_dataclass
from ...configs.yaml_reader import read_file
from ...mesh.errors import UserError
from ...mesh.files import check_local
from ...parallel.options import LocalPath

NAME = re.compile(r"(?:[A-Za-z0-9_][\w.+-]*@)?[A-Za-z0-9_:\[][\w.:%\]-]*")
"""A host, with or without a user; never an option of ssh."""
LINE = re.compile(rf"({NAME.pattern})(?:\s+slots=([0-9]{{1,6}}))?")
"""A line of a plain list: a host, and its number of processes as in the hostfiles of Open MPI."""
MAX_PROCESSES = 256
MAX_PORT = 65535
EXAMPLE = "{hosts: [gpu1, gpu2]}"


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host of the file: a name, or a mapping with these keys."""

    name: str
    """The name that ssh knows: gpu1, user@gpu1, an address, or a Host of ~/.ssh/config."""
    port: Annotated[int, Ge(0), Le(MAX_PORT)] = 0
    """The port of its SSH server; 0 = the default of ssh."""
    address: str = ""
    """The address for the other hosts if it is not the name; that of the first host is the coordinator's."""
    processes: Annotated[int, Ge(0), Le(MAX_PROCESSES)] = 0
    """The number of processes on this host; 0 = the value of the file."""
    python: LocalPath = ""
    """The Python interpreter on this host; "" = the value of the file."""
    directory: LocalPath = ""
    """The working directory on this host; "" = the value of the file."""

    @property
    def reached_at(self) -> str:
        """The address for the other hosts."""
        return self.address or self.name.rpartition("@")[2]

    def __post_init__(self) -> None:
        for key, text in (("name", self.name), ("address", self.address or self.name)):
            if not NAME.fullmatch(text):
                raise UserError(f"{key}={text!r} is not a valid host. Use a form such as gpu1, user@gpu1 or 10.0.0.1.")


@dataclass(frozen=True, kw_only=True)
class HostsFile:
    """The keys of a hosts file."""

    hosts: tuple[Host, ...] = ()
    """The hosts of the run, in the order of their ranks."""
    processes: Annotated[int, Ge(1), Le(MAX_PROCESSES)] = 1
    """The number of processes on each host."""
    gpus_per_process: Count = 0
    """GPUs that each process sees, in the order of the processes; 0 = the GPUs of a host are divided among them."""
    python: LocalPath = ""
    """The Python interpreter on the hosts; "" = launch.python of the config, or the path of this interpreter."""
    directory: LocalPath = ""
    """The working directory on the hosts, on a shared file system; "" = the path of the current one."""
    ssh: tuple[str, ...] = ()
    """Further arguments of ssh, such as "-i", "/home/me/.ssh/cluster"."""

    def __post_init__(self) -> None:
        servers = [(host.name, host.port) for host in self.hosts]
        if twice := [name for name, port in servers if servers.count((name, port)) > 1]:
            raise UserError(f"{twice[0]} is listed twice. List it once, with processes: 2 or more.")


@dataclass(frozen=True, kw_only=True)
class Hosts(HostsFile):
    """A hosts file; each host has its own number of processes."""

    source: str = ""
    """The path of the file."""

    @property
    def num_processes(self) -> int:
        """The number of processes of the run."""
        return sum(host.processes for host in self.hosts)


def read_hosts(path: Path) -> Hosts:
    """Reads a hosts file.

    Args:
        path: The path of the YAML file.

    Raises:
        ConfigError: The file is invalid; the message lists all problems: unknown keys, wrong types, duplicate hosts.
    """
    check_local(path, "The hosts file")
    if not path.is_file():
        kind = "it is a directory" if path.is_dir() else "the file is missing"
        raise ConfigError([f"{kind}. Use a YAML file such as {EXAMPLE}"], str(path) or "an empty name")
    document = read_file(path)
    plain = _read_lines(path)
    if plain is not None:
        document = document._replace(value=plain, lines={}, problems=[])
    problems = [*document.problems]
    tree = document.value
    if isinstance(tree, list):
        tree = {"hosts": tree}
    if not problems and not isinstance(tree, dict):
        problems.append(Problem("", f"the file must be a mapping such as {EXAMPLE}, or a list of hosts, got {tree!r}."))
    hosts = None if problems else to_dataclass(HostsFile, _prepare(tree, problems), "", problems)
    if hosts is not None and not hosts.hosts and not problems:
        problems.append(Problem("hosts", f"hosts must contain at least one host, such as {EXAMPLE}."))
    if problems:
        raise config_error(problems, str(path), document.lines, {}, "")
    assert hosts is not None
    complete = tuple(replace(host, processes=host.processes or hosts.processes) for host in hosts.hosts)
    return Hosts(**{**vars(hosts), "hosts": complete}, source=str(path))


def list_hosts(names: str) -> Hosts:
    """Returns the hosts of "gpu1,gpu2", with one process each.

    Raises:
        UserError: A name is invalid, or given twice.
    """
    hosts = tuple(Host(name=name.strip(), processes=1) for name in names.split(",") if name.strip())
    return Hosts(hosts=hosts, source=names)


def _read_lines(path: Path) -> dict[str, Any] | None:
    """Returns the hosts of a file with one host in each line; None if it is something else, such as YAML."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError):
        return None  # which `read_file` reports
    texts = [line.partition("#")[0].strip() for line in lines]
    found = [LINE.fullmatch(text) for text in texts if text]
    hosts: list[dict[str, Any]] = []
    for match in found:
        if match is None or match[1].count(":") == 1 or (match[1][0] == "[" and ":" not in match[1]):
            return None  # YAML: a key, or a list
        slots = {} if match[2] is None else {"processes": int(match[2])}
        hosts.append({"name": match[1], **slots})
    return {"hosts": hosts} if hosts else None


def _prepare(tree: dict[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Returns the keys of a file with each valid host as a mapping."""
    if not isinstance(tree.get("hosts"), list):
        return tree
    hosts = [{"name": each} if isinstance(each, str) else each for each in tree["hosts"]]
    for number, each in enumerate(hosts):
        path, found = f"hosts.{number}", list[Problem]()
        to_dataclass(Host, each, path, found)
        for problem in found:
            is_named = problem.message.startswith(path)
            problems.append(problem if is_named else problem._replace(message=f"{path}.{problem.message}"))
    return {**tree, "hosts": [] if problems else hosts}
