"""The Kubernetes objects of a run: one pod for each host, with one process that drives all GPUs of the pod.

The config is stored in a config map. The cluster gives each pod its index, which is the rank; the manifest gives the
number of processes and the address of the first pod. Therefore, pods do not ask the API server and need no role.

The cluster acts after the end of a pod, depending on its exit code:

    0          finished
    2, 3       a mistake, or diverged: the whole job fails, because another attempt would end in the same way
    disrupted  preempted, evicted, node lost: the pod is recreated, which does not count; the others end with 75
    others     75 too, because a full disk ends with it: counted, and limited. A JobSet restarts all pods; a Job
               recreates the one pod, while the others end on their own and are recreated too
"""

import hashlib
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

import yaml

from ..configs.secret_variables import redact
from ..mesh.errors import raise_problems
from ..mesh.exit_codes import DIVERGED, INVALID_INPUT
from .launchers import LaunchJob, render

PORT = 8476
"""The port of the coordinator; every pod has its own IP address."""
CONFIG_DIRECTORY = "/config"
"""The directory of the config in a pod."""
DEFAULT_DEADLINE_SECONDS = 7 * 86400
"""The time limit of a job without `launch.time`, from its start or restart."""
TEMPORARY = "/tmp"
"""The only directory of a pod, besides the volume, that can be written if its root file system is read-only."""
MEMORY_GIB = 4
"""The memory that a pod without launch.kubernetes.memory requests, for each GPU; it is no limit."""
GRACE_SECONDS = 30
"""The time to end a pod, in addition to timeouts.stop."""
RESERVED = ("/", CONFIG_DIRECTORY, TEMPORARY)
"""Directories that cannot be the mount of the volume."""
MAX_NAME = 26
"""Characters of a job's name: "NAME-host-0-0.NAME" must fit in a label of Kubernetes, 63 characters."""
LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
OBJECT_NAME = (rf"{LABEL}(\.{LABEL})*", "is not a valid name: use lowercase letters, digits, '-' and '.'.")
RULES = {
    "image": (
        r"([\w.-]+(:[0-9]{1,5})?/)?[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
        r"(:\w[\w.-]{0,127})?(@[\w+.-]+:[0-9a-f]{32,})?",  # registry, lowercase path, tag, digest
        "is not a valid container image. Use a lowercase path to an image that contains spmdkit, such as "
        "registry.example.org/team/train:1.4.",
    ),
    "name": (
        rf"[a-z]([-a-z0-9]{{0,{MAX_NAME - 2}}}[a-z0-9])?",
        "is not a valid name: use lowercase letters, digits and '-', beginning with a letter, at most "
        f"{MAX_NAME} characters.",
    ),
    "namespace": (LABEL, "is not a valid namespace: use lowercase letters, digits and '-', at most 63 characters."),
    "queue": OBJECT_NAME,
    "volume_claim": OBJECT_NAME,
    "service_account": OBJECT_NAME,
    "secrets": OBJECT_NAME,
    "memory": (
        r"[1-9][0-9]{0,11}(\.[0-9]{1,3})?([KMGTP]i|[kMGTP])",  # without a unit, Kubernetes reads bytes
        "must be a number with a unit, such as '64Gi' or '500M'.",
    ),
}
"""By key of launch.kubernetes: the pattern of a value, and the rule for messages."""
DIGEST_CHARACTERS = 6


def write_manifest(job: LaunchJob, resolved: str) -> str:
    """Returns the objects of a run as YAML, for `kubectl`.

    Args:
        job: The run to launch; the cluster makes its restarts.
        resolved: The text of the config that the pods read.

    Raises:
        UserError: The config cannot be launched on Kubernetes; the message lists all problems.
    """
    raise_problems(find_problems(job), "The config cannot be launched on Kubernetes:")
    launch, name = job.launch, job_name(job)
    digest = int(hashlib.sha256(resolved.encode()).hexdigest(), 16) % 10**8
    train = [launch.python or "python", "-P", "-m", "spmdkit", "train", f"{CONFIG_DIRECTORY}/config.yaml"]
    text = render(
        "kubernetes.yaml",
        launch=launch,
        name=name,
        config=resolved,
        config_map=f"{name}-{digest:08}",  # another config has another name, so a running job keeps its own
        config_directory=CONFIG_DIRECTORY,
        command=job.run_setup([*launch.prefix, *train], "-e"),
        environment={name: value for name, value in redact(launch.environment).items() if value is not None},
        restarts=job.request.restarts or launch.kubernetes.restarts,
        hopeless=[INVALID_INPUT, DIVERGED],
        deadline=parse_time_limit(launch.time or "0") or DEFAULT_DEADLINE_SECONDS,
        grace=job.timeouts.stop + GRACE_SECONDS,
        port=PORT,
        cpus=launch.cpus_per_process or max(1, launch.gpus_per_process),
        memory=launch.kubernetes.memory or f"{MEMORY_GIB * max(1, launch.gpus_per_process)}Gi",
        temporary=TEMPORARY,
    )
    objects = yaml.safe_load_all(text)
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes multi-line strings as blocks."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def job_name(job: LaunchJob) -> str:
    """Returns the name of the job: from the config, or from the name of the run's directory."""
    return job.launch.kubernetes.name or make_label(PurePosixPath(job.run_dir).name, MAX_NAME)


def make_label(text: str, max_length: int) -> str:
    """Converts any text to a DNS label: lowercase letters, digits and '-', beginning with a letter.

    Args:
        text: A text, such as the name of a directory.
        max_length: The maximum length; a label that is cut ends with a digest of the text.
    """
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "run"
    if not label[0].isalpha():
        label = f"run-{label}"
    if len(label) <= max_length:
        return label
    digest = hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]
    return f"{label[: max_length - DIGEST_CHARACTERS - 1].rstrip('-')}-{digest}"


def find_problems(job: LaunchJob) -> Iterator[str]:
    """Yields everything that prevents a launch on Kubernetes."""
    launch, wanted = job.launch, job.launch.kubernetes
    for key, (pattern, rule) in RULES.items():
        value = getattr(wanted, key)
        for each in value if key == "secrets" else [value] if value or key == "image" else []:
            if not re.fullmatch(pattern, each, re.ASCII):
                yield f"launch.kubernetes.{key}={each!r} {rule}"
    if not wanted.volume_claim:
        yield (
            "launch.kubernetes.volume_claim is missing. Set it to a PersistentVolumeClaim that all pods can write "
            "(ReadWriteMany): run.dir must outlive a pod and be the same for all."
        )
    secrets = [name for name, value in redact(launch.environment).items() if value is None]
    if secrets and not wanted.secrets:  # many people can read a manifest
        literals = " ".join(f'--from-literal={name}="${name}"' for name in secrets)
        yield (
            f"launch.environment: {', '.join(secrets)} must come from a Secret, because a manifest shows its values. "
            f"Create one (kubectl create secret generic my-secret {literals}), and set "
            "launch.kubernetes.secrets=[my-secret]."
        )
    mount = PurePosixPath(wanted.mount)
    if not mount.is_absolute() or ":" in wanted.mount or ".." in mount.parts or str(mount) in RESERVED:
        yield (
            f"launch.kubernetes.mount={wanted.mount!r} must be an absolute directory other than /, "
            f"{CONFIG_DIRECTORY} and {TEMPORARY}, without ':' and '..', such as /shared."
        )
    elif job.run_dir.startswith("/") and not is_below(job.run_dir, wanted.mount):
        yield (
            f"run.dir={job.run_dir} is not below launch.kubernetes.mount={wanted.mount}, the volume: it would be lost "
            "with the pod. Use a relative path, or one below that directory."
        )
    if launch.processes_per_node != 1:
        gpus = launch.processes_per_node * launch.gpus_per_process
        yield (
            f"launch.processes_per_node={launch.processes_per_node}, but a pod contains one process, which drives all "
            f"GPUs of the pod. Set launch.processes_per_node=1{f' and launch.gpus_per_process={gpus}' if gpus else ''}."
        )
    if job.request.fresh:
        yield "--fresh would start anew with every recreated pod. Set run.dir to another directory instead."


def parse_time_limit(text: str) -> int:
    """Returns a time limit in seconds; the syntax is that of Slurm.

    Args:
        text: "minutes", "minutes:seconds", "hours:minutes:seconds", "days-hours", "days-hours:minutes", ...
    """
    days, has_days, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not has_days and len(parts) < 3:
        parts.insert(0, 0)
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return 86400 * int(days or 0) + 3600 * hours + 60 * minutes + seconds


def is_below(path: str, directory: str) -> bool:
    """Returns whether a path of the container is in a directory, judging by its text."""
    return PurePosixPath(path).is_relative_to(directory) and ".." not in PurePosixPath(path).parts
