"""The hosts file of `--on ssh:hosts.yaml`: the hosts, the number of processes on each, and their environment.

    hosts: [gpu1, gpu2]
    gpus_per_process: 1
    processes: 8

All problems of a file are reported at once, as for a config.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StrictInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ...configs.config_errors import ConfigError
from ...configs.yaml_reader import read_text, read_yaml
from ...mesh.errors import is_printable, nearest

NAME = re.compile(r"(?:[A-Za-z0-9_][\w.+-]*@)?[A-Za-z0-9_:\[][\w.:%\]-]*")
"""A host, with or without a user; never an option of ssh."""
VARIABLE = re.compile(r"[A-Za-z_]\w*")
MAX_PROCESSES = 256
MAX_DEVICES = 4096
MAX_PORT = 65535
MAX_NAME = 253
"""The maximum length of a DNS name."""
EXAMPLE = "{hosts: [gpu1, gpu2]}"


def _check_host(text: str) -> str:
    if text and not NAME.fullmatch(text):
        raise ValueError("is not a valid host. Use a form such as gpu1, user@gpu1 or 10.0.0.1")
    if len(text.rpartition("@")[2]) > MAX_NAME:
        raise ValueError(f"is too long: a DNS name has at most {MAX_NAME} characters")
    return text


def _check_not_empty(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    return text


def _check_printable(text: str) -> str:
    if not is_printable(text):
        raise ValueError("must not contain control characters")
    return text


def _check_variable(text: str) -> str:
    if not VARIABLE.fullmatch(text):
        raise ValueError("is not a valid name of a variable")
    return text


def _to_mapping(item: Any) -> Any:
    return {"name": item} if isinstance(item, str) else item


def _to_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Text = Annotated[str, AfterValidator(_check_printable)]
HostName = Annotated[Text, AfterValidator(_check_host)]
Variable = Annotated[str, AfterValidator(_check_variable)]
OPTIONS = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class Host:
    """One host of the file: a name, or a mapping with these keys."""

    name: Annotated[HostName, AfterValidator(_check_not_empty)]
    """The name that ssh knows: gpu1, user@gpu1, an address, or a Host of ~/.ssh/config."""
    port: Annotated[StrictInt, Field(ge=0, le=MAX_PORT)] = 0
    """The port of its SSH server; 0 = the default of ssh."""
    address: HostName = ""
    """The address for the other hosts if it is not the name; that of the first host is the coordinator's."""
    processes: Annotated[StrictInt, Field(ge=0, le=MAX_PROCESSES)] = 0
    """The number of processes on this host; 0 = the value of the file."""
    python: Text = ""
    """The Python interpreter on this host; "" = the value of the file."""
    directory: Text = ""
    """The working directory on this host; "" = the value of the file."""

    @property
    def key(self) -> tuple[str, int]:
        """Identifies the host in the file."""
        return self.name, self.port

    @property
    def reached_at(self) -> str:
        """The address for the other hosts."""
        return self.address or self.name.rpartition("@")[2]


HostItem = Annotated[Host, BeforeValidator(_to_mapping)]


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class HostsFile:
    """The keys of a hosts file."""

    hosts: Annotated[tuple[HostItem, ...], Field(min_length=1)]
    """The hosts of the run, in the order of their ranks."""
    spares: tuple[HostItem, ...] = ()
    """Hosts that replace one that does not answer."""
    processes: Annotated[StrictInt, Field(ge=1, le=MAX_PROCESSES)] = 1
    """The number of processes on each host."""
    gpus_per_process: Annotated[StrictInt, Field(ge=0)] = 0
    """GPUs that each process sees, in the order of the processes; 0 = the GPUs of a host are divided among them."""
    simulate: Annotated[StrictInt, Field(ge=0, le=MAX_DEVICES)] = 0
    """CPU devices that each process simulates; 0 = run.simulate of the config."""
    python: Text = ""
    """The Python interpreter on the hosts; "" = launch.python of the config, or the path of this interpreter."""
    directory: Text = ""
    """The working directory on the hosts, on a shared file system; "" = the path of the current one."""
    forward: tuple[Variable, ...] = ()
    """Names of environment variables that the processes get with their values on this machine."""
    environment: Mapping[Variable, Annotated[Text, BeforeValidator(_to_text)]] = field(default_factory=dict)
    """Environment variables with their values."""
    ssh: tuple[Text, ...] = ()
    """Further arguments of ssh, such as "-i", "/home/me/.ssh/cluster"."""


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class Hosts(HostsFile):
    """A hosts file; each host has its own number of processes.

    Attributes:
        source: The path of the file.
    """

    source: Path

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
    if not path.is_file():
        kind = "it is a directory" if path.is_dir() else "the file is missing"
        raise ConfigError([f"{kind}. Use a YAML file such as {EXAMPLE}"], str(path) or "an empty name")
    text, problems = read_text(path)
    document = read_yaml(text) if not problems else None
    problems = [*problems, *(document.problems if document else [])]
    tree = document.value if document else None
    if problems or document is None:
        raise ConfigError([problem.message for problem in problems], str(path))
    if not isinstance(tree, dict):
        raise ConfigError([f"the file must be a mapping such as {EXAMPLE}, got {tree!r}."], str(path))
    try:
        given = TypeAdapter(HostsFile).validate_python(tree)
    except ValidationError as error:
        errors = error.errors()
        has_items = any(
            each["loc"][0] == "hosts" and len(each["loc"]) > 1 for each in errors
        )  # invalid, so not counted
        messages = [
            _describe(each, document.lines) for each in errors if not (has_items and each["type"] == "too_short")
        ]
        raise ConfigError(list(dict.fromkeys(messages)), str(path)) from None
    if found := _find_problems(given):
        raise ConfigError(found, str(path))

    def complete(host: Host) -> Host:
        return replace(
            host,
            processes=host.processes or given.processes,
            python=host.python or given.python,
            directory=host.directory or given.directory,
        )

    values = {each.name: getattr(given, each.name) for each in dataclasses.fields(HostsFile)}
    values |= {"hosts": tuple(map(complete, given.hosts)), "spares": tuple(map(complete, given.spares))}
    return Hosts(**values, source=path)


def _find_problems(given: HostsFile) -> list[str]:
    problems = []
    if given.simulate and given.gpus_per_process:
        problems.append(
            f"simulate={given.simulate} CPU devices and gpus_per_process={given.gpus_per_process} exclude each other. "
            "Keep one of them."
        )
    keys = [host.key for host in (*given.hosts, *given.spares)]
    twice = dict.fromkeys(name for name, port in keys if keys.count((name, port)) > 1)
    return problems + [f"{name} is listed twice. List it once, with processes: 2 or more." for name in twice]


def _describe(error: Any, lines: Mapping[tuple[str, ...], int]) -> str:
    """Returns the message of an error of pydantic, after the line of the file."""
    where = tuple(str(part) for part in error["loc"] if part != "[key]")
    path = ".".join(where)
    known = where
    while known and known not in lines:
        known = known[:-1]
    line = f"line {lines[known]}: " if known else ""
    kind, value = error["type"], error["input"]
    if kind == "missing":
        return f"{line}{path} is required."
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        names = [each.name for each in dataclasses.fields(Host if len(where) > 1 else HostsFile)]
        key = path.rpartition(".")[2]
        prefix = path.removesuffix(key)
        hint = "".join(f" Did you mean {prefix}{each}?" for each in nearest(key, names))
        return f"{line}{path} is not a valid key.{hint or ' The keys are ' + ', '.join(names) + '.'}"
    if kind in ("dataclass_type", "dataclass_exact_type"):
        return f"{line}{path} must be the name of a host or a mapping, got {value!r}."
    if kind == "tuple_type":
        return f"{line}{path} must be a list such as [gpu1, gpu2], got {value!r}."
    if kind == "too_short":
        return f"{line}{path} must contain at least one host, such as {EXAMPLE}."
    if kind == "value_error":
        return f"{line}{path}={value[:60]!r} {error['ctx']['error']}."
    rule = error["msg"].replace("Input should", "must").replace("a valid integer", "an integer")
    rule = rule.replace("a valid ", "a ").replace("greater than or equal to", "at least")
    return f"{line}{path} {rule.replace('less than or equal to', 'at most')}, got {value!r}."
