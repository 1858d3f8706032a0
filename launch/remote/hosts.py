"""The hosts file of `--on ssh:hosts.yaml`: which hosts, how many processes on each, and what they are given.

    hosts: [gpu1, gpu2]
    gpus_per_process: 1
    processes: 8

Everything that is wrong with it is told at once, as for a config.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from ...configs.errors import ConfigError, Problem
from ...configs.reading.convert import below, to_dataclass, unknown_key
from ...configs.reading.limits import AtLeast
from ...configs.reading.reader import read_text, read_yaml
from ...configs.reading.words import shown
from ...mesh.errors import UserError
from ...mesh.text import is_printable

NAME = re.compile(r"(?:[A-Za-z0-9_][\w.+-]*@)?[A-Za-z0-9_:\[][\w.:%\]-]*")
"""A host for ssh, with a user or without; never an option."""
VARIABLE = re.compile(r"[A-Za-z_]\w*")
MOST_PROCESSES = 256
"""On one host."""
MOST_DEVICES = 4096
"""That one process simulates."""
MOST_PORT = 65535
MOST_NAME = 253
"""Characters of a name of DNS."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host of the file: its name alone, or a mapping of these keys."""

    name: str
    """Of the host, as ssh knows it: gpu1, user@gpu1, an address, or a Host of ~/.ssh/config."""
    port: Annotated[int, AtLeast(0)] = 0
    """Of its SSH server; 0 = what ssh takes by itself, mostly 22."""
    address: str = ""
    """Under which the other hosts reach it, where that is not its name; that of the first host is the coordinator's."""
    processes: Annotated[int, AtLeast(0)] = 0
    """Processes of the run on it; 0 = as for all."""
    python: str = ""
    """Python interpreter there; empty = as for all."""
    directory: str = ""
    """Folder there in which the processes start; empty = as for all."""

    def __post_init__(self) -> None:
        problems = []
        if not NAME.fullmatch(self.name):
            problems.append(f"name={self.name!r} is not the name of a host. Write gpu1, user@gpu1 or an address.")
        if self.address and not NAME.fullmatch(self.address):
            problems.append(f"address={self.address!r} is not the name or the address of a host.")
        if max(len(self.name.rpartition("@")[2]), len(self.address)) > MOST_NAME:
            problems.append(f"name={self.name[:40]!r}... is longer than the {MOST_NAME} characters of a name of DNS.")
        if self.port > MOST_PORT:
            problems.append(f"port={self.port} is not a port; the largest is {MOST_PORT}.")
        if self.processes > MOST_PROCESSES:
            problems.append(f"processes={self.processes} are too many for one host; at most {MOST_PROCESSES}.")
        if problems:
            raise UserError("\n".join(problems))

    @property
    def key(self) -> tuple[str, int]:
        """What no other host of the file has."""
        return self.name, self.port

    @property
    def reached_at(self) -> str:
        """Under which the other hosts reach it."""
        return self.address or self.name.rpartition("@")[2]


@dataclass(frozen=True, kw_only=True)
class Common:
    """What the file says of all hosts."""

    processes: Annotated[int, AtLeast(1)] = 1
    """Processes of the run on each host that does not say otherwise."""
    gpus_per_process: Annotated[int, AtLeast(0)] = 0
    """GPUs that each process sees: the first process of a host the first ones, and so on; 0 = those of a host are
    divided among its processes."""
    simulate: Annotated[int, AtLeast(0)] = 0
    """CPU devices that each process simulates; 0 = what the config says."""
    python: str = ""
    """Python interpreter on the hosts; empty = launch.python of the config, or the path of the one that runs this."""
    directory: str = ""
    """Folder on the hosts in which the processes start, on a file system that all share; empty = the path of this."""
    forward: tuple[str, ...] = ()
    """Names of environment variables that the processes get as they are here."""
    environment: Mapping[str, str | int] = field(default_factory=dict)
    """Environment variables that the processes get with these values."""
    ssh: tuple[str, ...] = ()
    """Further words for ssh, one each, such as "-i", "/home/me/.ssh/cluster"."""

    def __post_init__(self) -> None:
        problems = []
        if self.processes > MOST_PROCESSES:
            problems.append(f"processes={self.processes} are too many for one host; at most {MOST_PROCESSES}.")
        if self.simulate > MOST_DEVICES:
            problems.append(f"simulate={self.simulate} devices are too many for one process; at most {MOST_DEVICES}.")
        if self.simulate and self.gpus_per_process:
            problems.append(
                f"simulate={self.simulate} CPU devices and gpus_per_process={self.gpus_per_process} exclude each "
                "other. Keep one of them."
            )
        wrong = [name for name in (*self.forward, *self.environment) if not VARIABLE.fullmatch(name)]
        problems += [f"forward or environment: {name!r} is not the name of a variable." for name in wrong]
        problems += [
            f"environment={name}: its value must be text without control characters."
            for name, value in self.environment.items()
            if not is_printable(str(value))
        ]
        if problems:
            raise UserError("\n".join(problems))


@dataclass(frozen=True, kw_only=True)
class Hosts(Common):
    """A hosts file.

    Attributes:
        hosts: That take part, in the order of their ranks; each with its own number of processes.
        spares: That take the place of one that does not answer.
        source: The file.
    """

    hosts: tuple[Host, ...]
    spares: tuple[Host, ...] = ()
    source: Path

    @property
    def num_processes(self) -> int:
        """Of the run."""
        return sum(host.processes for host in self.hosts)


def read_hosts(path: Path) -> Hosts:
    """Reads a hosts file.

    Args:
        path: Of a YAML file.

    Raises:
        ConfigError: Everything that is wrong with it: unknown keys, wrong types, no host, one host twice.
    """
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "no such file"
        raise ConfigError([f"{kind}. Give a YAML file such as: hosts: [gpu1, gpu2]"], str(path) or "an empty name")
    text, problems = read_text(path)
    document = read_yaml(text) if not problems else None
    problems += document.problems if document else []
    tree = document.value if document else {}
    if not isinstance(tree, dict | None):
        problems.append(Problem("", f"the file must be a mapping such as {{hosts: [gpu1, gpu2]}}, not {shown(tree)}."))
    hosts = _to_hosts(tree if isinstance(tree, dict) else {}, path, problems)
    if problems or hosts is None:
        lines = document.lines if document else {}
        raise ConfigError([_located(problem, lines) for problem in dict.fromkeys(problems)], str(path))
    return hosts


def _to_hosts(tree: Mapping[str, Any], path: Path, problems: list[Problem]) -> Hosts | None:
    """Builds what a file says; adds what is wrong to `problems`, and returns None where that leaves nothing."""
    names = [*(each.name for each in dataclasses.fields(Common)), "hosts", "spares"]
    problems.extend(unknown_key(str(key), names) for key in tree if key not in names)
    given: dict[str, Any] = {key: value for key, value in tree.items() if key in names}
    hosts, spares = (_to_list(given.pop(key, None), key, problems) for key in ("hosts", "spares"))
    before = len(problems)
    common = to_dataclass(Common, given, "", problems)
    problems[before:] = [_keyed(problem) for problem in problems[before:]]
    if not hosts and not any(problem.path.startswith("hosts") for problem in problems):
        problems.append(Problem("hosts", "hosts must name one host at least, such as hosts: [gpu1, gpu2]."))
    _refuse_twice([*hosts, *spares], problems)
    if problems or common is None:
        return None
    own = {each.name: getattr(common, each.name) for each in dataclasses.fields(Common)}
    main, others = (tuple(_complete(host, common) for host in each) for each in (hosts, spares))
    return Hosts(**own, hosts=main, spares=others, source=path)


def _to_list(value: Any, key: str, problems: list[Problem]) -> list[Host]:
    """Reads a list of hosts, each a name or a mapping."""
    if value is None:
        return []
    if not isinstance(value, list):
        problems.append(Problem(key, f"{key} must be a list such as [gpu1, gpu2], not {shown(value)}."))
        return []
    found = [_to_host(item, below(key, str(number)), problems) for number, item in enumerate(value)]
    return [host for host in found if host is not None]


def _to_host(item: Any, path: str, problems: list[Problem]) -> Host | None:
    if isinstance(item, str):
        item = {"name": item}
    if not isinstance(item, Mapping):
        problems.append(
            Problem(path, f"{path} must be the name of a host or a mapping of its keys, not {shown(item)}.")
        )
        return None
    before = len(problems)
    host = to_dataclass(Host, item, path, problems)
    problems[before:] = [_named(problem, path) for problem in problems[before:]]
    return host


def _keyed(problem: Problem) -> Problem:
    """A problem whose message begins with its key, such as `processes=257 are too many`."""
    return problem if problem.path else Problem(problem.message.partition("=")[0], problem.message)


def _named(problem: Problem, path: str) -> Problem:
    """A problem of one host, which says of which."""
    return problem if problem.message.startswith(path) else Problem(path, f"{path}.{problem.message}")


def _refuse_twice(hosts: list[Host], problems: list[Problem]) -> None:
    seen: set[tuple[str, int]] = set()
    for host in hosts:
        if host.key in seen:
            problems.append(Problem("", f"{host.name} is named twice. Name it once, with processes: 2 or more."))
        seen.add(host.key)


def _complete(host: Host, common: Common) -> Host:
    return dataclasses.replace(
        host,
        processes=host.processes or common.processes,
        python=host.python or common.python,
        directory=host.directory or common.directory,
    )


def _located(problem: Problem, lines: Mapping[tuple[str, ...], int]) -> str:
    """A problem's message, after the line of the file that it comes from."""
    parts = tuple(problem.path.split("."))
    while parts and parts != ("",):
        if parts in lines:
            return f"line {lines[parts]}: {problem.message}"
        parts = parts[:-1]
    return problem.message
