"""The section `launch` of a config: the settings of clusters. Nothing here changes the numbers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from annotated_types import Ge, Le

from ..mesh.errors import UserError, raise_problems
from ..parallel.options import LocalPath

TIME = re.compile(r"([0-9]{1,4}-)?[0-9]{1,6}(:[0-5]?[0-9]){0,2}")
"""A time limit of a scheduler: minutes, hours:minutes:seconds, days-hours:minutes:seconds."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NAME = re.compile(r"[\w.@:/+,-]*")
"""An account or a quality of service; may be empty."""

Count: TypeAlias = Annotated[int, Ge(0)]
Positive: TypeAlias = Annotated[int, Ge(1)]


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """Settings of `spmdkit launch --on slurm`, in addition to the sizes above."""

    account: str = ""
    """Account that the job is charged to; empty = the scheduler's default."""
    qos: str = ""
    """Quality of service; empty = the scheduler's default."""
    warn_seconds: Annotated[int, Ge(0), Le(65535)] = 120
    """Seconds before the time limit at which Slurm sends SIGUSR1; the run then saves and ends. 0 = never."""
    requeue: bool = True
    """Requeue a job that was stopped or lost a node; it then resumes by itself."""
    restarts: Count = 3
    """Maximum number of consecutive requeues without a newer checkpoint."""
    options: tuple[str, ...] = ()
    """Additional options of sbatch, one each, such as "--exclusive" or "--constraint=h100"."""
    srun_options: tuple[str, ...] = ()
    """Additional options of srun, which starts the processes, such as "--container-image=..."."""

    def __post_init__(self) -> None:
        for key in ("account", "qos"):
            if not NAME.fullmatch(getattr(self, key)):
                raise UserError(f"launch.slurm.{key}={getattr(self, key)!r} must be one word.")
        for key, example in (("options", "--constraint=h100"), ("srun_options", "--container-image=...")):
            for option in getattr(self, key):  # "-C h100" would be one word for the scheduler
                if not re.match(r"--[a-z]", option):
                    rule = f"must be one long option with its value, such as {example!r}"
                    raise UserError(f"launch.slurm.{key}: {option!r} {rule}.")


@dataclass(frozen=True, kw_only=True)
class MpiConfig:
    """Settings of `spmdkit launch --on mpi`, in addition to the sizes above."""

    options: tuple[str, ...] = ()
    """Additional arguments of mpirun, one word each, such as ["--mca", "oob_tcp_if_include", "eth0"]."""


@dataclass(frozen=True, kw_only=True)
class KubernetesConfig:
    """Settings of the manifest of `spmdkit launch --on kubernetes`."""

    form: Literal["jobset", "job"] = "jobset"
    """jobset, a JobSet; job, an Indexed Job with a headless Service, for clusters without the JobSet controller."""
    image: str = ""
    """Container image with spmdkit, your modules and, for GPUs, JAX's CUDA packages; required."""
    name: str = ""
    """Name of the job; empty = derived from the name of run.dir."""
    namespace: str = ""
    """Namespace; empty = that of the current context."""
    queue: str = ""
    """Name of a Kueue queue; empty = none."""
    volume_claim: str = ""
    """PersistentVolumeClaim, readable and writable by all pods, mounted at `mount`, for run.dir and data."""
    mount: LocalPath = "/shared"
    """Mount path; relative paths of the config start there."""
    memory: str = ""
    """Memory request and limit of each pod, such as "64Gi"; empty = a request of 4 GiB for each GPU, and no limit. A
    pod requests launch.cpus_per_process CPU cores, by default one for each GPU."""
    read_only: bool = True
    """Mount the image read-only (readOnlyRootFilesystem): a pod can write to the volume and to /tmp, which is removed
    with it. Set to false if launch.setup installs packages into the image."""
    keep_seconds: Count = 604800
    """Seconds after which Kubernetes removes an ended job with its pods and their logs (ttlSecondsAfterFinished); 0 =
    never."""
    secrets: tuple[str, ...] = ()
    """Secrets of the namespace; every pod gets all of their keys as environment variables (envFrom)."""
    service_account: str = ""
    """Service account of the pods; empty = the namespace's default. Its API token is never mounted."""
    user: Count = 0
    """User ID of the pods; 0 = the one of the image, which must not be root."""
    group: Count = 0
    """Group ID of the pods, which also gets write access to the volume (fsGroup); 0 = the one of the image."""
    restarts: Count = 6
    """Maximum number of restarts of all pods after one fails or exits with code 75; --restarts K sets it too."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Settings for starting the run on a cluster (`spmdkit launch --on slurm`, `mpi`, `kubernetes`)."""

    nodes: Positive = 1
    """Number of hosts."""
    processes_per_node: Positive = 1
    """Processes of the run on each host; on kubernetes 1, because a pod contains one."""
    gpus_per_process: Count = 0
    """GPUs of each process; 0 = request none."""
    cpus_per_process: Count = 0
    """CPU cores of each process; 0 = the launcher's default."""
    time: str = ""
    """Time limit of the job, "hours:minutes:seconds"; empty = the launcher's default, on kubernetes 7 days."""
    python: LocalPath = ""
    """Python interpreter on the hosts; empty = the path of the one that runs this command."""
    setup: tuple[str, ...] = ()
    """Shell lines to run before the processes start, such as "module load cuda"."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables of every process that ssh, slurm, mpi or kubernetes starts; null = the value of the current
    shell. Values of secrets such as HF_TOKEN or WANDB_API_KEY are passed on but never written."""
    elastic: tuple[str, ...] = ()
    """Mesh axes, of data and fsdp, that are resized if the run starts with fewer or more devices than strategy
    requires; the first one is resized first. Empty = the sizes must fit."""
    prefix: tuple[str, ...] = ()
    """Words before the interpreter, such as ["apptainer", "exec", "--nv", "image.sif"]."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    mpi: MpiConfig = field(default_factory=MpiConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)

    @property
    def num_processes(self) -> int:
        """The number of processes of the run on all hosts."""
        return self.nodes * self.processes_per_node

    def __post_init__(self) -> None:
        problems = [
            f"launch.environment: {name!r} is not a valid name of an environment variable: use letters, digits and _."
            for name in self.environment
            if not VARIABLE.fullmatch(name)
        ]
        if self.time and not TIME.fullmatch(self.time):
            problems.append(
                f"launch.time={self.time!r} is not a valid time limit. Use hours:minutes:seconds such as '12:00:00', "
                "days-hours:minutes:seconds, or minutes."
            )
        raise_problems(problems)
