"""What the variables of each launcher say about this process: one small function for each, in the order of SOURCES.

A function gives what its launcher says, or None where this process was not started by it. It raises a UserError only
where a variable is there and cannot be read.
"""

from collections.abc import Callable, Mapping
from zlib import crc32

from .addresses import Address, parse_address
from .facts import Environ, Facts, first_set, from_addresses, number, numbered, numbers, present
from .hostlists import expand_counts, expand_hosts

FIRST_PORT, PORTS = 61440, 4096
"""Above the ports that Linux hands out by itself (up to 60999)."""
LOOPBACK = "127.0.0.1"
JOB_VARIABLES = ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID")
"""What Keras's variables and ours are called after their prefix."""


def spmdkit(environ: Environ) -> Facts | None:
    """SPMDKIT_*: `spmdkit launch` sets them, and whoever starts processes by hand."""
    facts = _by_hand("SPMDKIT_*", "SPMDKIT_", environ)
    read = {
        "local_rank": number(environ, "SPMDKIT_LOCAL_RANK", 0),
        "local_processes": number(environ, "SPMDKIT_LOCAL_PROCESSES", 1),
        "local_devices": numbers(environ, "SPMDKIT_LOCAL_DEVICES"),
        "identity": environ.get("SPMDKIT_JOB_ID") or None,
    }
    read = {name: value for name, value in read.items() if value is not None}
    if not read:
        return facts
    said = {name: f"SPMDKIT_{'JOB_ID' if name == 'identity' else name.upper()}" for name in read}
    facts = facts or Facts("SPMDKIT_*")
    return facts._replace(**read, said={**facts.said, **said})


def keras(environ: Environ) -> Facts | None:
    """KERAS_DISTRIBUTION_*: those of `keras.distribution.initialize`."""
    return _by_hand("KERAS_DISTRIBUTION_*", "KERAS_DISTRIBUTION_", environ)


def jax(environ: Environ) -> Facts | None:
    """JAX_*: Kubeflow Trainer sets all three; JAX itself reads the address alone."""
    names = {"address": "JAX_COORDINATOR_ADDRESS", "num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
    found = present(environ, names)
    text, port = environ.get("JAX_COORDINATOR_ADDRESS"), environ.get("JAX_COORDINATOR_PORT")
    if text and port and ":" not in text:
        text = f"{text}:{port}"
    return (
        None
        if found is None
        else Facts(
            "JAX_*",
            address=parse_address(text, "JAX_COORDINATOR_ADDRESS") if text else None,
            num_processes=number(environ, "JAX_NUM_PROCESSES", 1),
            process_id=number(environ, "JAX_PROCESS_ID", 0),
            said=found,
        )
    )


def open_mpi(environ: Environ) -> Facts | None:
    """OMPI_COMM_WORLD_*: `mpirun` of Open MPI, any version."""
    names = {
        "num_processes": "OMPI_COMM_WORLD_SIZE",
        "process_id": "OMPI_COMM_WORLD_RANK",
        "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
        "local_processes": "OMPI_COMM_WORLD_LOCAL_SIZE",
    }
    job = first_set(environ, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    return _of_mpi("Open MPI", names, job, environ, environ.get("SLURM_JOB_NODELIST"))


def pmi(environ: Environ) -> Facts | None:
    """PMI_*: MPICH, Intel MPI, and `srun --mpi=pmi2`."""
    names = {
        "num_processes": "PMI_SIZE",
        "process_id": "PMI_RANK",
        "local_rank": "MPI_LOCALRANKID",
        "local_processes": "MPI_LOCALNRANKS",
    }
    nodes = None if "SLURM_STEP_ID" in environ else environ.get("SLURM_JOB_NODELIST")  # a step says its own
    return _of_mpi("PMI", names, first_set(environ, "PMI_JOBID"), environ, nodes)


def pmix(environ: Environ) -> Facts | None:
    """PMIX_*: they say who, but not how many; another source has to."""
    found = present(environ, {"process_id": "PMIX_RANK"})
    return None if found is None else Facts("PMIx", process_id=number(environ, "PMIX_RANK", 0), said=found)


def slurm(environ: Environ) -> Facts | None:
    """SLURM_*: a task of `srun`, or the batch script, in which nothing was started yet."""
    job = first_set(environ, "SLURM_JOB_ID", "SLURM_JOBID")
    if job is None:
        return None
    if "SLURM_STEP_ID" not in environ:
        return _slurm_batch(environ)
    names = {
        "num_processes": "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS",
        "process_id": "SLURM_PROCID",
        "local_rank": "SLURM_LOCALID",
    }
    facts = numbered("Slurm", names, environ)
    listed = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_JOB_NODELIST"
    nodes = tuple(expand_hosts(environ[listed], listed)) if environ.get(listed) else ()
    restart = environ.get("SLURM_RESTART_COUNT", "0")
    cluster, step = environ.get("SLURM_CLUSTER_NAME", ""), environ["SLURM_STEP_ID"]
    identity = " ".join(filter(None, ("slurm", cluster, f"{environ[job]}.{step}", f"restart {restart}")))
    host = LOOPBACK if len(nodes) == 1 else nodes[0] if nodes else None
    said = {**facts.said, "identity": job} | ({"address": listed, "nodes": listed} if host else {})
    return facts._replace(
        address=Address(host, port_of(identity)) if host else None,
        local_processes=_slurm_local_processes(environ, len(nodes)),
        nodes=nodes,
        identity=identity,
        said=said,
    )


def kubernetes(environ: Environ) -> Facts | None:
    """JOB_COMPLETION_INDEX: a pod of an Indexed Job or a JobSet; the manifest says how many, and where the first is."""
    found = present(environ, {"process_id": "JOB_COMPLETION_INDEX"})
    return (
        None
        if found is None
        else Facts("Kubernetes", process_id=number(environ, "JOB_COMPLETION_INDEX", 0), said=found)
    )


BY_HAND: Mapping[str, Callable[[Environ], Facts | None]] = {
    "SPMDKIT_*": spmdkit,
    "KERAS_DISTRIBUTION_*": keras,
    "JAX_*": jax,
}
"""Sources that somebody set on purpose: they must not contradict each other, and win over those below."""

OF_LAUNCHERS: Mapping[str, Callable[[Environ], Facts | None]] = {
    "Open MPI": open_mpi,
    "PMI": pmi,
    "Slurm": slurm,
    "PMIx": pmix,
    "Kubernetes": kubernetes,
}
"""Sources that a launcher sets in every process that it starts. The first that says both who and how many is believed:
`mpirun` within an allocation of Slurm starts processes that see the variables of both, and only its own are right."""

SET_BY_HAND = frozenset(
    [
        *(f"{prefix}_{name}" for prefix in ("SPMDKIT", "KERAS_DISTRIBUTION") for name in JOB_VARIABLES),
        *(f"SPMDKIT_{name}" for name in ("LOCAL_RANK", "LOCAL_PROCESSES", "LOCAL_DEVICES", "JOB_ID", "SIMULATE")),
        *(f"JAX_{name}" for name in ("COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID")),
    ]
)
"""The variables of those sources."""

SOURCES = {**BY_HAND, **OF_LAUNCHERS}
"""All of them, in the order in which they are believed."""


def port_of(identity: str) -> int:
    """The port of a job whose launcher gives none: the same in all its processes, mostly another for another job."""
    return FIRST_PORT + crc32(identity.encode()) % PORTS


def without_job(environ: Environ) -> dict[str, str]:
    """An environment without what somebody set on purpose about a job, for processes of another job."""
    return {name: value for name, value in environ.items() if name not in SET_BY_HAND}


def _by_hand(source: str, prefix: str, environ: Environ) -> Facts | None:
    """The three variables that Keras and this package have alike."""
    facts = ("address", "num_processes", "process_id")
    names = {fact: prefix + name for fact, name in zip(facts, JOB_VARIABLES, strict=True)}
    found = present(environ, names)
    return (
        None
        if found is None
        else from_addresses(
            source,
            environ.get(names["address"]),
            number(environ, names["num_processes"], 1),
            number(environ, names["process_id"], 0),
            names["address"],
            found,
        )
    )


def _of_mpi(
    source: str, names: Mapping[str, str], job: str | None, environ: Environ, nodelist: str | None
) -> Facts | None:
    """MPI gives no address: on one host that is loopback; in an allocation of Slurm, its first host."""
    if not present(environ, {name: names[name] for name in ("num_processes", "process_id")}):
        return None
    facts = numbered(source, names, environ)
    if job is None:
        return facts
    identity = f"{source} {environ[job]}"
    facts = facts._replace(identity=identity, said={**facts.said, "identity": job})
    nodes = expand_hosts(nodelist, "SLURM_JOB_NODELIST") if nodelist else []
    if len(nodes) == 1 or (facts.local_processes is not None and facts.local_processes == facts.num_processes):
        nodes = [LOOPBACK]
    if not nodes:
        return facts
    said = {**facts.said, "address": "SLURM_JOB_NODELIST" if len(nodes) > 1 else job}
    return facts._replace(address=Address(nodes[0], port_of(identity)), said=said)


def _slurm_batch(environ: Environ) -> Facts | None:
    """The batch script, or the shell of `salloc`: no process was started yet."""
    tasks = number(environ, "SLURM_NTASKS", 1) or 1
    nodes = number(environ, "SLURM_JOB_NUM_NODES", 1) or 1
    if tasks == 1 and nodes == 1:
        return None
    variable = "SLURM_NTASKS" if tasks > 1 else "SLURM_JOB_NUM_NODES"
    return Facts(
        "Slurm",
        unusable=f"Slurm has allocated {max(tasks, nodes)} tasks ({variable}), but this is the batch script itself "
        "(there is no SLURM_STEP_ID): it would train alone. Start it with srun: `srun spmdkit train ...`; or set "
        "SPMDKIT_NUM_PROCESSES=1 to train in one process.",
        said={"num_processes": variable},
    )


def _slurm_local_processes(environ: Environ, nodes: int) -> int | None:
    """How many tasks of this step run on this host."""
    name = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in environ else "SLURM_TASKS_PER_NODE"
    node = number(environ, "SLURM_NODEID", 0)
    counts = expand_counts(environ[name], name) if environ.get(name) else []
    if node is None or node >= len(counts) or (nodes and len(counts) != nodes):
        return None
    return counts[node]
