"""The job as the environment variables of each launcher describe it; the table SOURCES has their names."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from zlib import crc32

from ...mesh.errors import UserError
from .addresses import Address, parse_address

Environ = Mapping[str, str]
Names = Mapping[str, tuple[str, ...]]
FIRST_PORT, PORTS = 61440, 4096
"""Above the ports that Linux assigns by itself (up to 60999)."""
LOOPBACK = "127.0.0.1"
UNKNOWN_RANK = -1
JOB_VARIABLES = {"address": "JOB_ADDRESSES", "num_processes": "NUM_PROCESSES", "process_id": "PROCESS_ID"}
"""The names of Keras's variables and of ours after the prefix."""
RANGE = r"\d{1,6}(?:-\d{1,6})?"
HOST_ITEM = re.compile(rf"(?:[\w.-]|\[{RANGE}(?:,{RANGE})*\])+", re.ASCII)
"""An item of a host list of Slurm."""


class Job(NamedTuple):
    """The run of this process and its place in it, or the part of it that one source describes.

    Attributes:
        source: The source of the rank.
        address: The address of the coordinator, process 0; it can be None in a run of one process.
        num_processes: The number of processes; 0 if unknown.
        process_id: The rank of this process; UNKNOWN_RANK if unknown.
        local_rank: Its rank among the processes of its host, if known.
        local_processes: The number of processes on its host, if known.
        local_devices: The indices of its GPUs among the visible ones; None = all.
        hosts: The host of each process by rank, if known.
        nodes: The hosts of the job, if it is unknown which process is on which.
        identity: The attempt of the job, equal in its processes and in no others; or "".
        variables: The variable of each of these values, by name.
    """

    source: str = ""
    address: Address | None = None
    num_processes: int = 0
    process_id: int = UNKNOWN_RANK
    local_rank: int | None = None
    local_processes: int | None = None
    local_devices: tuple[int, ...] | None = None
    hosts: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    identity: str = ""
    variables: Mapping[str, str] = {}

    @property
    def is_complete(self) -> bool:
        """True if both the rank and the number of processes are known."""
        return self.num_processes > 0 and self.process_id != UNKNOWN_RANK

    @property
    def is_shared(self) -> bool:
        """True if the run has several processes."""
        return self.num_processes > 1

    def known_values(self, *facts: str) -> dict[str, Any]:
        """Returns those of some values that are known, by name."""
        return {fact: value for fact in facts if (value := getattr(self, fact)) != self._field_defaults[fact]}


def add_addresses(facts: Job, text: str, variable: str) -> Job:
    """Adds the address of the coordinator, or the addresses of all processes.

    Args:
        facts: The other facts of the source.
        text: Comma-separated "host:port" of every process, the coordinator first; or the coordinator alone.
        variable: The variable or argument with the addresses, for messages.

    Raises:
        UserError: An address is invalid, or the number of addresses is not the number of processes.
    """
    addresses = [parse_address(each, variable) for each in text.split(",")]
    if len(addresses) == 1:
        return facts._replace(address=addresses[0])
    if facts.num_processes not in (0, len(addresses)):
        raise UserError(
            f"The provided job_addresses {[*map(str, addresses)]} has {len(addresses)} jobs, but num_processes is "
            f"{facts.num_processes}. Give one address per process, or the coordinator's address alone."
        )
    return facts._replace(
        address=addresses[0],
        num_processes=len(addresses),
        hosts=tuple(address.host for address in addresses),
        variables={"num_processes": variable, **facts.variables},
    )


MANUAL: Mapping[str, Names] = {
    "SPMDKIT_*": {
        **{fact: (f"SPMDKIT_{name}",) for fact, name in JOB_VARIABLES.items()},
        "local_rank": ("SPMDKIT_LOCAL_RANK",),
        "local_processes": ("SPMDKIT_LOCAL_PROCESSES",),
        "local_devices": ("SPMDKIT_LOCAL_DEVICES",),
        "identity": ("SPMDKIT_JOB_ID",),
    },
    "KERAS_DISTRIBUTION_*": {fact: (f"KERAS_DISTRIBUTION_{name}",) for fact, name in JOB_VARIABLES.items()},
    "JAX_*": {
        "address": ("JAX_COORDINATOR_ADDRESS",),
        "num_processes": ("JAX_NUM_PROCESSES",),
        "process_id": ("JAX_PROCESS_ID",),
    },
}
"""Sources that are set on purpose: they must not contradict each other, and take precedence over those below.

SPMDKIT_* is set by `spmdkit launch` or by hand, KERAS_DISTRIBUTION_* for `keras.distribution.initialize`, and JAX_* by
Kubeflow Trainer; JAX itself reads only its address.
"""

LAUNCHERS: Mapping[str, Names] = {
    "Open MPI": {
        "num_processes": ("OMPI_COMM_WORLD_SIZE",),
        "process_id": ("OMPI_COMM_WORLD_RANK",),
        "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK",),
        "local_processes": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        "identity": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    },
    "PMI": {
        "num_processes": ("PMI_SIZE",),
        "process_id": ("PMI_RANK",),
        "local_rank": ("MPI_LOCALRANKID",),
        "local_processes": ("MPI_LOCALNRANKS",),
        "identity": ("PMI_JOBID",),
    },
    "Slurm": {
        "num_processes": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "process_id": ("SLURM_PROCID",),
        "local_rank": ("SLURM_LOCALID",),
        "identity": ("SLURM_JOB_ID", "SLURM_JOBID"),
    },
    "PMIx": {"process_id": ("PMIX_RANK",)},
    "Kubernetes": {"process_id": ("JOB_COMPLETION_INDEX",)},
}
"""Sources that a launcher sets in its processes. The first with a rank and a number of processes is used: under
`mpirun` in a Slurm allocation, processes see the variables of both, and only those of `mpirun` are right.

PMI is MPICH, Intel MPI, and `srun --mpi=pmi2`. PMIx and a pod of a Job or JobSet only have a rank; another source must
give the number of processes, such as the manifest of the pod.
"""

SOURCES = {**MANUAL, **LAUNCHERS}
"""The variables of each fact by source, in order of precedence; the first variable that is set is used."""

MANUAL_VARIABLES = frozenset(
    ["SPMDKIT_SIMULATE", *(name for names in MANUAL.values() for each in names.values() for name in each)]
)


def read_source(source: str, environ: Environ) -> Job | None:
    """Returns the facts of a source; None if it does not describe this process.

    Args:
        source: A key of SOURCES.
        environ: The variables.

    Raises:
        UserError: A variable is invalid; or this is a batch script of Slurm or an `salloc` shell with several tasks.
    """
    set_names = {fact: [name for name in names if environ.get(name)] for fact, names in SOURCES[source].items()}
    found = {fact: names[0] for fact, names in set_names.items() if names}
    if not found or (source == "Slurm" and "identity" not in found):
        return None
    values = {fact: READERS[fact](environ, name) for fact, name in found.items() if fact != "address"}
    facts = Job(source, **values, variables=found)
    if "address" in found:
        return add_addresses(facts, environ[found["address"]], found["address"])
    if source == "Slurm":
        return _complete_slurm(facts, environ)
    if source in ("Open MPI", "PMI"):
        has_own_hosts = source == "PMI" and "SLURM_STEP_ID" in environ
        return _complete_mpi(facts, None if has_own_hosts else environ.get("SLURM_JOB_NODELIST"))
    return facts


def _complete_slurm(facts: Job, environ: Environ) -> Job | None:
    """Adds the address, the hosts and the attempt of a task of `srun`."""
    if "SLURM_STEP_ID" not in environ:
        for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES"):
            if (number := read_integer(environ, name, 1) or 1) > 1:
                raise UserError(
                    f"Slurm has allocated {number} tasks ({name}), but this is the batch script itself (SLURM_STEP_ID "
                    "is not set): it would train alone. Start it with srun: `srun spmdkit train ...`; or set "
                    "SPMDKIT_NUM_PROCESSES=1 to train in one process."
                )
        return None
    cluster, restart = environ.get("SLURM_CLUSTER_NAME", ""), environ.get("SLURM_RESTART_COUNT", "0")
    step = f"{facts.identity}.{environ['SLURM_STEP_ID']}"
    facts = facts._replace(identity=" ".join(filter(None, ("slurm", cluster, step, f"restart {restart}"))))
    listed = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_JOB_NODELIST"
    if not environ.get(listed):
        return facts
    nodes = tuple(expand_hosts(environ[listed], listed))
    counts = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", ""))
    node = read_integer(environ, "SLURM_NODEID", 0)
    return facts._replace(
        address=Address(LOOPBACK if len(nodes) == 1 else nodes[0], job_port(facts.identity)),
        local_processes=None if node is None or node >= len(counts) or len(counts) != len(nodes) else counts[node],
        nodes=nodes,
        variables={**facts.variables, "address": listed, "nodes": listed},
    )


def _complete_mpi(facts: Job, nodelist: str | None) -> Job | None:
    """Adds an address, which MPI does not set: loopback on one host, the first host of a Slurm allocation."""
    if not facts.known_values("num_processes", "process_id"):
        return None
    if not facts.identity:
        return facts
    job = facts.variables["identity"]
    identity = f"{facts.source} {facts.identity}"
    nodes = expand_hosts(nodelist, "SLURM_JOB_NODELIST") if nodelist else []
    if len(nodes) == 1 or facts.local_processes == facts.num_processes:
        nodes = [LOOPBACK]
    if not nodes:
        return facts._replace(identity=identity)
    variables = {**facts.variables, "address": "SLURM_JOB_NODELIST" if len(nodes) > 1 else job}
    return facts._replace(identity=identity, address=Address(nodes[0], job_port(identity)), variables=variables)


def job_port(identity: str) -> int:
    """Returns the port for a launcher that sets none: equal in all processes of a job, mostly different across jobs."""
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


READERS: Mapping[str, Callable[[Environ, str], Any]] = {
    "num_processes": lambda environ, name: read_integer(environ, name, 1),
    "process_id": lambda environ, name: read_integer(environ, name, 0),
    "local_rank": lambda environ, name: read_integer(environ, name, 0),
    "local_processes": lambda environ, name: read_integer(environ, name, 1),
    "local_devices": read_integers,
    "identity": lambda environ, name: environ[name],
}
"""By fact, except the address."""


def expand_hosts(text: str, variable: str) -> list[str]:
    """Expands a host list of Slurm such as "n[1-4,7]", "rack[01-02]n[1-2],login" or "a,b", in its order.

    Args:
        text: The host list.
        variable: The variable that contains it, for the message.

    Raises:
        UserError: The list is invalid.
    """
    items = [item.strip() for item in re.split(r",(?![^\[]*\])", text)]
    ranges = [each.split("-") for bracket in re.findall(r"\[(.*?)\]", text) for each in bracket.split(",")]
    is_valid = all(HOST_ITEM.fullmatch(item) for item in items)
    if not is_valid or any(int(limits[0]) > int(limits[-1]) for limits in ranges):
        raise UserError(f"{variable}={text[:200]!r} is not a valid host list such as n[1-4,7],login.")
    return [host for item in items for host in _expand_item(item)]


def _expand_item(item: str) -> list[str]:
    """Expands every bracket of an item, the last one fastest."""
    before, bracket, rest = item.partition("[")
    if not bracket:
        return [item]
    ranges, _, after = rest.partition("]")
    numbers: list[str] = []
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return [f"{before}{number}{end}" for number in numbers for end in _expand_item(after)]


def expand_counts(text: str) -> list[int]:
    """Expands Slurm's tasks per node: "2(x3),1" is three nodes with two tasks and one with one."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, repeats in found for _ in range(int(repeats or 1))]
