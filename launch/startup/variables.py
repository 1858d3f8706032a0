"""The job as each launcher's environment variables describe it: one function per launcher, in the order of SOURCES.

A function returns None if its launcher did not start this process. It raises UserError only if a variable is set and
invalid.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from zlib import crc32

from ...mesh.errors import UserError
from .addresses import Address, parse_address

Environ = Mapping[str, str]
FIRST_PORT, PORTS = 61440, 4096
"""Above the ports that Linux assigns by itself (up to 60999)."""
LOOPBACK = "127.0.0.1"
JOB_VARIABLES = ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID")
"""The names of Keras's variables and of ours after the prefix."""
MAX_HOSTS = 2**16


class Facts(NamedTuple):
    """The part of a job that one source describes.

    Attributes:
        source: Its name, for messages.
        address: The address of the coordinator, process 0.
        num_processes: The number of processes.
        process_id: The rank of this process.
        local_rank: Its rank among the processes of its host.
        local_processes: The number of processes on its host.
        local_devices: The indices of its accelerators, if the launcher sets them.
        hosts: The host of every process, by rank.
        nodes: The hosts, if it is unknown which process is on which.
        identity: The attempt of the job; equal in its processes and in no others.
        unusable: An error message if the source cannot be used, or "".
        variables: The variable of each of these values, by name.
    """

    source: str
    address: Address | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_rank: int | None = None
    local_processes: int | None = None
    local_devices: tuple[int, ...] | None = None
    hosts: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    identity: str = ""
    unusable: str = ""
    variables: Mapping[str, str] = {}

    @property
    def is_complete(self) -> bool:
        """True if both the rank and the number of processes are known."""
        return self.num_processes is not None and self.process_id is not None


def from_addresses(
    source: str,
    job_addresses: str | None,
    num_processes: int | None,
    process_id: int | None,
    variable: str,
    variables: Mapping[str, str],
) -> Facts:
    """Returns the facts of a job that is described by addresses.

    Args:
        source: The name of the source.
        job_addresses: Comma-separated "host:port" of every process, the coordinator first; or the coordinator alone.
        num_processes: The number of processes.
        process_id: The rank of this process.
        variable: The variable or argument with the addresses, for messages.
        variables: See `Facts`.

    Raises:
        UserError: An address is invalid, or the number of addresses is not `num_processes`.
    """
    addresses = [parse_address(text, variable) for text in job_addresses.split(",")] if job_addresses else []
    if len(addresses) > 1:
        if num_processes not in (None, len(addresses)):
            raise UserError(
                f"The provided job_addresses {[*map(str, addresses)]} has {len(addresses)} jobs, but num_processes is "
                f"{num_processes}. Give one address per process, or the coordinator's address alone."
            )
        num_processes, variables = len(addresses), {"num_processes": variable, **variables}
    return Facts(
        source,
        address=addresses[0] if addresses else None,
        num_processes=num_processes,
        process_id=process_id,
        hosts=tuple(address.host for address in addresses) if len(addresses) > 1 else (),
        variables=variables,
    )


def read_spmdkit(environ: Environ) -> Facts | None:
    """SPMDKIT_*: set by `spmdkit launch` or by hand."""
    facts = _read_manual("SPMDKIT_*", "SPMDKIT_", environ)
    read = {
        "local_rank": read_integer(environ, "SPMDKIT_LOCAL_RANK", 0),
        "local_processes": read_integer(environ, "SPMDKIT_LOCAL_PROCESSES", 1),
        "local_devices": read_integers(environ, "SPMDKIT_LOCAL_DEVICES"),
        "identity": environ.get("SPMDKIT_JOB_ID") or None,
    }
    read = {name: value for name, value in read.items() if value is not None}
    if not read:
        return facts
    names = {name: f"SPMDKIT_{'JOB_ID' if name == 'identity' else name.upper()}" for name in read}
    facts = facts or Facts("SPMDKIT_*")
    return facts._replace(**read, variables={**facts.variables, **names})


def read_keras(environ: Environ) -> Facts | None:
    """KERAS_DISTRIBUTION_*: the variables of `keras.distribution.initialize`."""
    return _read_manual("KERAS_DISTRIBUTION_*", "KERAS_DISTRIBUTION_", environ)


def read_jax(environ: Environ) -> Facts | None:
    """JAX_*: Kubeflow Trainer sets all three; JAX itself reads only the address."""
    names = {"address": "JAX_COORDINATOR_ADDRESS", "num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
    found = _names_set(environ, names)
    if not found:
        return None
    text, port = environ.get("JAX_COORDINATOR_ADDRESS"), environ.get("JAX_COORDINATOR_PORT")
    if text and port and ":" not in text:
        text = f"{text}:{port}"
    return Facts(
        "JAX_*",
        address=parse_address(text, "JAX_COORDINATOR_ADDRESS") if text else None,
        num_processes=read_integer(environ, "JAX_NUM_PROCESSES", 1),
        process_id=read_integer(environ, "JAX_PROCESS_ID", 0),
        variables=found,
    )


def read_open_mpi(environ: Environ) -> Facts | None:
    """OMPI_COMM_WORLD_*: `mpirun` of any version of Open MPI."""
    names = {
        "num_processes": "OMPI_COMM_WORLD_SIZE",
        "process_id": "OMPI_COMM_WORLD_RANK",
        "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
        "local_processes": "OMPI_COMM_WORLD_LOCAL_SIZE",
    }
    job = _first_set(environ, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    return _read_mpi("Open MPI", names, job, environ, environ.get("SLURM_JOB_NODELIST"))


def read_pmi(environ: Environ) -> Facts | None:
    """PMI_*: MPICH, Intel MPI, and `srun --mpi=pmi2`."""
    names = {
        "num_processes": "PMI_SIZE",
        "process_id": "PMI_RANK",
        "local_rank": "MPI_LOCALRANKID",
        "local_processes": "MPI_LOCALNRANKS",
    }
    nodes = None if "SLURM_STEP_ID" in environ else environ.get("SLURM_JOB_NODELIST")  # a step has its own list
    return _read_mpi("PMI", names, _first_set(environ, "PMI_JOBID"), environ, nodes)


def read_pmix(environ: Environ) -> Facts | None:
    """PMIX_*: the rank without the number of processes, which another source must give."""
    found = _names_set(environ, {"process_id": "PMIX_RANK"})
    return Facts("PMIx", process_id=read_integer(environ, "PMIX_RANK", 0), variables=found) if found else None


def read_slurm(environ: Environ) -> Facts | None:
    """SLURM_*: a task of `srun`; or the batch script, which did not start any task."""
    job = _first_set(environ, "SLURM_JOB_ID", "SLURM_JOBID")
    if job is None:
        return None
    if "SLURM_STEP_ID" not in environ:
        return _read_slurm_batch(environ)
    names = {
        "num_processes": "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS",
        "process_id": "SLURM_PROCID",
        "local_rank": "SLURM_LOCALID",
    }
    facts = _read_integers("Slurm", names, environ)
    listed = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_JOB_NODELIST"
    nodes = tuple(expand_hosts(environ[listed], listed)) if environ.get(listed) else ()
    cluster, restart = environ.get("SLURM_CLUSTER_NAME", ""), environ.get("SLURM_RESTART_COUNT", "0")
    step = f"{environ[job]}.{environ['SLURM_STEP_ID']}"
    identity = " ".join(filter(None, ("slurm", cluster, step, f"restart {restart}")))
    host = LOOPBACK if len(nodes) == 1 else nodes[0] if nodes else None
    variables = {**facts.variables, "identity": job} | ({"address": listed, "nodes": listed} if host else {})
    return facts._replace(
        address=Address(host, job_port(identity)) if host else None,
        local_processes=_slurm_local_processes(environ, len(nodes)),
        nodes=nodes,
        identity=identity,
        variables=variables,
    )


def read_kubernetes(environ: Environ) -> Facts | None:
    """JOB_COMPLETION_INDEX: a pod of an Indexed Job or a JobSet; the manifest sets the other variables."""
    found = _names_set(environ, {"process_id": "JOB_COMPLETION_INDEX"})
    rank = read_integer(environ, "JOB_COMPLETION_INDEX", 0)
    return Facts("Kubernetes", process_id=rank, variables=found) if found else None


MANUAL: Mapping[str, Callable[[Environ], Facts | None]] = {
    "SPMDKIT_*": read_spmdkit,
    "KERAS_DISTRIBUTION_*": read_keras,
    "JAX_*": read_jax,
}
"""Sources that are set on purpose: they must not contradict each other, and take precedence over those below."""

LAUNCHERS: Mapping[str, Callable[[Environ], Facts | None]] = {
    "Open MPI": read_open_mpi,
    "PMI": read_pmi,
    "Slurm": read_slurm,
    "PMIx": read_pmix,
    "Kubernetes": read_kubernetes,
}
"""Sources that a launcher sets in its processes. The first with a rank and a number of processes is used: under
`mpirun` in a Slurm allocation, processes see the variables of both, and only those of `mpirun` are right."""

MANUAL_VARIABLES = frozenset(
    [
        *(f"{prefix}_{name}" for prefix in ("SPMDKIT", "KERAS_DISTRIBUTION") for name in JOB_VARIABLES),
        *(f"SPMDKIT_{name}" for name in ("LOCAL_RANK", "LOCAL_PROCESSES", "LOCAL_DEVICES", "JOB_ID", "SIMULATE")),
        *(f"JAX_{name}" for name in ("COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID")),
    ]
)

SOURCES = {**MANUAL, **LAUNCHERS}
"""All sources in order of precedence."""


def job_port(identity: str) -> int:
    """Returns the port of a job whose launcher sets none: equal in all its processes, mostly different between jobs."""
    return FIRST_PORT + crc32(identity.encode()) % PORTS


def without_job_variables(environ: Environ) -> dict[str, str]:
    """Returns an environment without the manual job variables, for the processes of another job."""
    return {name: value for name, value in environ.items() if name not in MANUAL_VARIABLES}


def read_integer(environ: Environ, name: str, minimum: int) -> int | None:
    """Returns a variable as an integer; None if it is not set.

    Raises:
        UserError: It is not an integer of at least the minimum.
    """
    text = environ.get(name)
    if not text:
        return None
    digits = text.strip()
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 10) or int(digits) < minimum:
        raise UserError(f"Environment variable {name} must be an integer of at least {minimum}, got {text[:60]!r}.")
    return int(digits)


def read_integers(environ: Environ, name: str) -> tuple[int, ...] | None:
    """Returns a variable as comma-separated integers; None if it is not set."""
    text = environ.get(name)
    if not text:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise UserError(f"Environment variable {name} must be comma-separated integers such as 0,1, got {text[:60]!r}.")
    return tuple(map(int, parts))


def _read_integers(source: str, names: Mapping[str, str], environ: Environ) -> Facts:
    minimum = {"num_processes": 1, "local_processes": 1}
    values = {fact: read_integer(environ, name, minimum.get(fact, 0)) for fact, name in names.items()}
    return Facts(source, **values, variables=_names_set(environ, names))  # pyright: ignore[reportArgumentType]


def _names_set(environ: Environ, names: Mapping[Any, str]) -> dict[str, str]:
    """Returns those of the names whose variable is set and not empty."""
    return {fact: name for fact, name in names.items() if environ.get(name)}


def _first_set(environ: Environ, *names: str) -> str | None:
    return next((name for name in names if environ.get(name)), None)


def _read_manual(source: str, prefix: str, environ: Environ) -> Facts | None:
    """Reads the three variables that Keras and this package have in common."""
    names = dict(
        zip(("address", "num_processes", "process_id"), (prefix + name for name in JOB_VARIABLES), strict=True)
    )
    found = _names_set(environ, names)
    if not found:
        return None
    count, rank = read_integer(environ, names["num_processes"], 1), read_integer(environ, names["process_id"], 0)
    return from_addresses(source, environ.get(names["address"]), count, rank, names["address"], found)


def _read_mpi(
    source: str, names: Mapping[str, str], job: str | None, environ: Environ, nodelist: str | None
) -> Facts | None:
    """Adds an address, which MPI does not set: loopback on one host, the first host of a Slurm allocation."""
    if not _names_set(environ, {name: names[name] for name in ("num_processes", "process_id")}):
        return None
    facts = _read_integers(source, names, environ)
    if job is None:
        return facts
    identity = f"{source} {environ[job]}"
    facts = facts._replace(identity=identity, variables={**facts.variables, "identity": job})
    nodes = expand_hosts(nodelist, "SLURM_JOB_NODELIST") if nodelist else []
    if len(nodes) == 1 or (facts.local_processes is not None and facts.local_processes == facts.num_processes):
        nodes = [LOOPBACK]
    if not nodes:
        return facts
    variables = {**facts.variables, "address": "SLURM_JOB_NODELIST" if len(nodes) > 1 else job}
    return facts._replace(address=Address(nodes[0], job_port(identity)), variables=variables)


def _read_slurm_batch(environ: Environ) -> Facts | None:
    """Reads the variables of a batch script or an `salloc` shell, in which no task was started."""
    tasks = read_integer(environ, "SLURM_NTASKS", 1) or 1
    nodes = read_integer(environ, "SLURM_JOB_NUM_NODES", 1) or 1
    if tasks == 1 and nodes == 1:
        return None
    variable = "SLURM_NTASKS" if tasks > 1 else "SLURM_JOB_NUM_NODES"
    return Facts(
        "Slurm",
        unusable=f"Slurm has allocated {max(tasks, nodes)} tasks ({variable}), but this is the batch script itself "
        "(SLURM_STEP_ID is not set): it would train alone. Start it with srun: `srun spmdkit train ...`; or set "
        "SPMDKIT_NUM_PROCESSES=1 to train in one process.",
        variables={"num_processes": variable},
    )


def _slurm_local_processes(environ: Environ, nodes: int) -> int | None:
    """Returns the number of tasks of this step on this host."""
    name = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in environ else "SLURM_TASKS_PER_NODE"
    node = read_integer(environ, "SLURM_NODEID", 0)
    counts = expand_counts(environ[name], name) if environ.get(name) else []
    if node is None or node >= len(counts) or (nodes and len(counts) != nodes):
        return None
    return counts[node]


def expand_hosts(text: str, variable: str = "the host list") -> list[str]:
    """Expands a host list of Slurm such as "n[1-4,7]", "rack[01-02]n[1-2],login" or "a,b", in its order.

    Args:
        text: The host list.
        variable: The variable that contains it, for the message.

    Raises:
        UserError: The list is invalid or too long.
    """
    items = re.split(r",(?![^\[]*\])", text)
    hosts = [host for item in items for host in _expand_item(item.strip(), variable, text)]
    if len(hosts) > MAX_HOSTS:
        raise UserError(f"{variable}={text[:200]!r} contains more than {MAX_HOSTS} hosts.")
    return hosts


def _expand_item(item: str, variable: str, text: str) -> list[str]:
    """Expands every bracket of an item, the last one fastest."""
    match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]*)\](.*)", item)
    if match is None:
        if not item or "[" in item or "]" in item:
            raise UserError(f"{variable}={text[:200]!r} is not a valid host list such as n[1-4,7],login.")
        return [item]
    before, ranges, after = match.groups()
    rests = _expand_item(after, variable, text) if after else [""]
    found = []
    for each in ranges.split(","):
        limits = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", each.strip(), re.ASCII)
        first, last = (limits[1], limits[2] or limits[1]) if limits else ("1", "0")
        if not 0 <= int(last) - int(first) < MAX_HOSTS:
            raise UserError(f"{variable}={text[:200]!r}: {each[:50]!r} is not a valid range such as n[1-4,7].")
        numbers = range(int(first), int(last) + 1)
        found += [f"{before}{number:0{len(first)}d}{rest}" for number in numbers for rest in rests]
    return found


def expand_counts(text: str, variable: str = "the counts") -> list[int]:
    """Expands Slurm's tasks per node: "2(x3),1" is three nodes with two tasks and one with one.

    Args:
        text: The counts.
        variable: The variable that contains them, for the message.

    Raises:
        UserError: The counts are invalid.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", item.strip(), re.ASCII)
        if match is None or len(counts) > MAX_HOSTS:
            raise UserError(f"{variable}={text[:200]!r}: {item[:50]!r} is not a valid count such as 2(x3).")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
