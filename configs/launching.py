"""The section `launch` of a config: what a cluster has to know to start a run. Nothing here changes the numbers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ..mesh.errors import UserError
from ..mesh.text import is_printable
from .reading.limits import AtLeast

TIME = re.compile(r"([0-9]{1,4}-)?[0-9]{1,6}(:[0-5]?[0-9]){0,2}")
"""A time limit as schedulers write it: minutes, hours:minutes:seconds, days-hours:minutes:seconds."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NAME = re.compile(r"[\w.@:/+,-]*")
"""Of an account or a quality of service; empty where none is given."""


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
    restarts: Annotated[int, AtLeast(0)] = 3
    """How often in a row the job goes back into the queue without a newer checkpoint, before it ends for good."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, one each, such as "--exclusive" or "--constraint=h100"."""
    srun_options: tuple[str, ...] = ()
    """Further options of srun, which starts the processes, such as "--container-image=..."."""

    def __post_init__(self) -> None:
        for key in ("account", "qos"):
            if not NAME.fullmatch(getattr(self, key)):
                raise UserError(f"launch.slurm.{key}={getattr(self, key)!r} must be one word.")
        refuse_options("launch.slurm.options", self.options, "--constraint=h100")
        refuse_options("launch.slurm.srun_options", self.srun_options, "--container-image=...")


@dataclass(frozen=True, kw_only=True)
class MpiConfig:
    """What `spmdkit launch --on mpi` gives to mpirun, beside the sizes above."""

    options: tuple[str, ...] = ()
    """Further options of mpirun, a word each, such as ["--mca", "oob_tcp_if_include", "eth0"]."""


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
    mount: str = "/shared"
    """Where it is mounted; what is relative in the config starts there."""
    memory: str = ""
    """Memory of each pod, requested and at most, such as "64Gi"; empty = not limited. The CPU cores that a pod requests
    are launch.cpus_per_process."""
    secrets: tuple[str, ...] = ()
    """Secrets of the namespace; every pod gets all of their keys as environment variables (envFrom)."""
    service_account: str = ""
    """Service account of the pods; empty = the namespace's default. Its API token is never mounted."""
    user: Annotated[int, AtLeast(0)] = 0
    """User ID that the pods run as; 0 = the one of the image, which must not be root."""
    group: Annotated[int, AtLeast(0)] = 0
    """Group ID that the pods run as, and that the volume is made writable for (fsGroup); 0 = the one of the image."""
    restarts: Annotated[int, AtLeast(0)] = 6
    """How often all pods start again after one fails or ends with 75, before the run fails for good; --restarts K sets
    it too."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """What a cluster has to know to start the run (`spmdkit launch --on slurm`, `mpi`, `kubernetes`)."""

    nodes: Annotated[int, AtLeast(1)] = 1
    """Hosts."""
    processes_per_node: Annotated[int, AtLeast(1)] = 1
    """Processes of the run on each host; on kubernetes 1, for a pod holds one."""
    gpus_per_process: Annotated[int, AtLeast(0)] = 0
    """GPUs of each process; 0 = none are asked for."""
    cpus_per_process: Annotated[int, AtLeast(0)] = 0
    """CPU cores of each process; 0 = the place's own default."""
    time: str = ""
    """Time limit of the job, "hours:minutes:seconds"; empty = the place's own default, on kubernetes 7 days."""
    python: str = ""
    """Python interpreter on the hosts; empty = the path of the one that runs this command."""
    setup: tuple[str, ...] = ()
    """Lines of shell before the processes start, such as "module load cuda"."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables of every process that ssh, slurm, mpi or kubernetes starts; null takes the value that the
    shell has. The value of a name such as HF_TOKEN or WANDB_API_KEY is passed on but never written."""
    elastic: tuple[str, ...] = ()
    """Mesh axes, of data and fsdp, whose sizes follow the number of devices when the run starts with fewer or more than
    strategy asks for; the first one named gives way first. Empty = the sizes have to fit."""
    prefix: tuple[str, ...] = ()
    """Words before the interpreter, such as ["apptainer", "exec", "--nv", "image.sif"]."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    mpi: MpiConfig = field(default_factory=MpiConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)

    @property
    def num_processes(self) -> int:
        """Processes of the run, on all hosts together."""
        return self.nodes * self.processes_per_node

    def __post_init__(self) -> None:
        problems = [
            f"launch.environment: {name!r} is no name of an environment variable: letters, digits and _."
            for name in self.environment
            if not VARIABLE.fullmatch(name)
        ]
        problems += [
            f"launch.environment.{name} must be text without control characters."
            for name, value in self.environment.items()
            if VARIABLE.fullmatch(name) and not is_printable(value or "")
        ]
        if self.time and not TIME.fullmatch(self.time):
            problems.append(
                f"launch.time={self.time!r} is no time limit. Give hours:minutes:seconds such as '12:00:00', "
                "days-hours:minutes:seconds, or minutes."
            )
        if problems:
            raise UserError("\n".join(problems))


def refuse_options(key: str, options: tuple[str, ...], example: str) -> None:
    """Makes sure that each of some options is one word that begins with two dashes.

    Raises:
        UserError: One is not; such as "-C h100", which would be a single word to the scheduler.
    """
    for option in options:
        if not re.match(r"--[a-z]", option):
            raise UserError(f"{key}: {option!r} must be one long option with its value, such as {example!r}.")
