"""The section `launch` of a config: what a cluster has to know to start a run. Nothing here changes the numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from .limits import AtLeast


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """What `spmdkit launch --on slurm` asks the scheduler for, beside the sizes above."""

    account: str = ""
    """Whom the job is charged to; empty = the scheduler's default."""
    qos: str = ""
    """Quality of service; empty = the scheduler's default."""
    warn_seconds: Annotated[int, AtLeast(0)] = 120
    """How long before the time limit Slurm sends SIGUSR1, on which the run saves and ends; 0 = never."""
    requeue: bool = True
    """Whether a job that was stopped, or whose node died, goes back into the queue and resumes by itself."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, one each, such as "--exclusive" or "--constraint=h100"."""


@dataclass(frozen=True, kw_only=True)
class KubernetesConfig:
    """What a manifest of `spmdkit launch --on kubernetes` names."""

    form: Literal["jobset", "job"] = "jobset"
    """jobset, a JobSet; job, an Indexed Job with a headless Service, for clusters without the JobSet controller."""
    image: str = ""
    """Container image with spmdkit, your modules and, for GPUs, JAX's CUDA packages; must be given."""
    name: str = ""
    """Name of the job; empty = made from the name of run.dir."""
    namespace: str = ""
    """Namespace; empty = that of the current context."""
    queue: str = ""
    """Name of a Kueue queue; empty = none."""
    volume_claim: str = ""
    """PersistentVolumeClaim, readable and writable by all pods, mounted at `mount`: run.dir and data belong there."""
    mount: str = "/runs"
    """Where it is mounted."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """What a cluster has to know to start the run (`spmdkit launch --on slurm`, `mpi`, `kubernetes`)."""

    nodes: Annotated[int, AtLeast(1)] = 1
    """Hosts."""
    processes_per_node: Annotated[int, AtLeast(1)] = 1
    """Processes of the run on each host."""
    gpus_per_process: Annotated[int, AtLeast(0)] = 0
    """GPUs of each process; 0 = none are asked for."""
    cpus_per_process: Annotated[int, AtLeast(0)] = 0
    """CPU cores of each process; 0 = the place's own default."""
    time: str = ""
    """Time limit of the job, "hours:minutes:seconds"; empty = the place's own default."""
    python: str = ""
    """Python interpreter on the hosts; empty = the path of the one that runs this command."""
    setup: tuple[str, ...] = ()
    """Lines of shell before the processes start, such as "module load cuda"."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of every process."""
    elastic: tuple[str, ...] = ()
    """Mesh axes, of data and fsdp, whose sizes follow the number of devices when the run starts with fewer or more than
    strategy asks for; the first one named gives way first. Empty = the sizes have to fit."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
