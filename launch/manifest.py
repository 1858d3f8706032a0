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
from typing import Any

import yaml

from ..configs.secret_variables import redact
from ..mesh.errors import UserError
from ..mesh.exit_codes import DIVERGED, INVALID_INPUT
from .launchers import LaunchJob

GROUP = "host"
"""The name of the only group of pods in a JobSet."""
CONTAINER = "spmdkit"
COORDINATOR = "metadata.annotations['jobset.sigs.k8s.io/coordinator']"
QUEUE = "kueue.x-k8s.io/queue-name"
PORT = 8476
"""The port of the coordinator; every pod has its own IP address."""
CONFIG_DIRECTORY = "/config"
"""The directory of the config in a pod."""
DEFAULT_DEADLINE_SECONDS = 7 * 86400
"""The time limit of a job without `launch.time`, from its start or restart."""
GRACE_SECONDS = 30
"""The time to end a pod, in addition to timeouts.stop."""
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
Object = dict[str, Any]
"""A part of a manifest."""


def write_manifest(job: LaunchJob, resolved: str) -> str:
    """Returns the objects of a run as YAML, for `kubectl`.

    Args:
        job: The run to launch; the cluster makes its restarts.
        resolved: The text of the config that the pods read.

    Raises:
        UserError: The config cannot be launched on Kubernetes; the message lists all problems.
    """
    if problems := [*find_problems(job)]:
        raise UserError(
            "\n".join(["The config cannot be launched on Kubernetes:", *(f"  {each}" for each in problems)])
        )
    return yaml.dump_all(build_objects(job, resolved), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def build_objects(job: LaunchJob, resolved: str) -> list[Object]:
    """Returns the objects of a run, in order of creation."""
    digest = int(hashlib.sha256(resolved.encode()).hexdigest(), 16) % 10**8
    config_map = f"{job_name(job)}-{digest:08}"  # another config has another name, so a running job keeps its own
    first: Object = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job) | {"name": config_map},
        "immutable": True,
        "data": {"config.yaml": resolved},
    }
    if job.launch.kubernetes.form == "jobset":
        return [first, _jobset(job, config_map)]
    return [first, _service(job), _indexed_job(job, config_map)]


def _jobset(job: LaunchJob, config_map: str) -> Object:
    spec = _job_spec(job, config_map, 0, {"fieldRef": {"fieldPath": COORDINATOR}})
    rule = {
        "name": "hopeless",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job, queued=True),
        "spec": {
            "coordinator": {"replicatedJob": GROUP, "jobIndex": 0, "podIndex": 0},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": _restarts(job),
                "restartStrategy": "BlockingRecreate",
                "rules": [rule],
            },
            "replicatedJobs": [{"name": GROUP, "replicas": 1, "template": {"spec": spec}}],
        },
    }


def _indexed_job(job: LaunchJob, config_map: str) -> Object:
    name = job_name(job)
    spec = _job_spec(job, config_map, _restarts(job) * job.launch.nodes, f"{name}-0.{name}")
    spec["template"]["spec"]["subdomain"] = name
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(job, queued=True), "spec": spec}


def _service(job: LaunchJob) -> Object:
    """Returns the service that gives the pods of a Job their names; for a JobSet, its controller does that."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": job_name(job)},
            "ports": [{"name": "coordinator", "port": PORT, "protocol": "TCP"}],
        },
    }


def _job_spec(job: LaunchJob, config_map: str, failures: int, coordinator: str | Object) -> Object:
    """Returns the Indexed Job of all pods.

    Args:
        job: The run to launch.
        config_map: The name of the config map.
        failures: The maximum number of failed pods, without those that do not count.
        coordinator: The host name of the first pod, or the field that contains it.
    """
    nodes = job.launch.nodes
    exit_codes = {"containerName": CONTAINER, "operator": "In", "values": [INVALID_INPUT, DIVERGED]}
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": failures,
        "activeDeadlineSeconds": parse_time_limit(job.launch.time or "0") or DEFAULT_DEADLINE_SECONDS,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": exit_codes},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"metadata": {"labels": _labels(job)}, "spec": _pod(job, config_map, coordinator)},
    }


def _pod(job: LaunchJob, config_map: str, coordinator: str | Object) -> Object:
    """Returns a pod: a container with all its GPUs, the config map, and the volume of the run's directory."""
    launch, wanted = job.launch, job.launch.kubernetes
    volumes = [
        {"name": "config", "configMap": {"name": config_map}},
        {"name": "shared", "persistentVolumeClaim": {"claimName": wanted.volume_claim}},
    ]
    mounts = [
        {"name": "config", "mountPath": CONFIG_DIRECTORY, "readOnly": True},
        {"name": "shared", "mountPath": wanted.mount},
    ]
    if launch.gpus_per_process:
        volumes.append({"name": "memory", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "memory", "mountPath": "/dev/shm"})  # for NCCL; the default has 64 MiB
    train = [launch.python or "python", "-P", "-m", "spmdkit", "train", f"{CONFIG_DIRECTORY}/config.yaml"]
    container = {
        "name": CONTAINER,
        "image": wanted.image,
        "workingDir": wanted.mount,
        "command": job.run_setup([*launch.prefix, *train], "-e"),
        "env": _environment(job, coordinator),
        **_given(envFrom=[{"secretRef": {"name": name}} for name in wanted.secrets]),
        "ports": [{"name": "coordinator", "containerPort": PORT, "protocol": "TCP"}],
        **_given(resources=_resources(job)),
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    ids = _given(runAsUser=wanted.user, runAsGroup=wanted.group, fsGroup=wanted.group)
    if wanted.group:
        ids["fsGroupChangePolicy"] = "OnRootMismatch"
    return {
        "restartPolicy": "Never",
        **_given(serviceAccountName=wanted.service_account),
        "automountServiceAccountToken": False,
        # The profile "restricted" of Kubernetes' pod security standards
        "securityContext": {"runAsNonRoot": True, **ids, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": job.timeouts.stop + GRACE_SECONDS,
        "containers": [container],
        "volumes": volumes,
    }


def _environment(job: LaunchJob, coordinator: str | Object) -> list[Object]:
    """Returns the variables of a pod; Kubernetes adds its index as JOB_COMPLETION_INDEX, and Secrets add secrets."""
    host = {"value": coordinator} if isinstance(coordinator, str) else {"valueFrom": coordinator}
    given = {name: value for name, value in redact(job.launch.environment).items() if value is not None}
    return [
        *({"name": name, "value": value.replace("$(", "$$(")} for name, value in given.items()),
        {"name": "SPMDKIT_COORDINATOR", **host},
        {"name": "SPMDKIT_JOB_ADDRESSES", "value": f"$(SPMDKIT_COORDINATOR):{PORT}"},
        {"name": "SPMDKIT_NUM_PROCESSES", "value": str(job.launch.nodes)},
        {"name": "PYTHONUNBUFFERED", "value": "1"},
    ]


def _resources(job: LaunchJob) -> Object:
    cpus, gpus, memory = job.launch.cpus_per_process, job.launch.gpus_per_process, job.launch.kubernetes.memory
    requests = _given(cpu=str(cpus or ""), memory=memory)
    return _given(requests=requests, limits=_given(**{"nvidia.com/gpu": str(gpus or "")}, memory=memory))


def _given(**fields: Any) -> Object:
    """Returns the fields that are not empty or 0."""
    return {name: value for name, value in fields.items() if value}


def _restarts(job: LaunchJob) -> int:
    return job.request.restarts or job.launch.kubernetes.restarts


def _metadata(job: LaunchJob, *, queued: bool = False) -> Object:
    wanted = job.launch.kubernetes
    labels = _labels(job) | ({QUEUE: wanted.queue} if queued and wanted.queue else {})
    return {"name": job_name(job), **_given(namespace=wanted.namespace), "labels": labels}


def _labels(job: LaunchJob) -> dict[str, str]:
    return {"app.kubernetes.io/name": "spmdkit", "app.kubernetes.io/instance": job_name(job)}


class _Dumper(yaml.SafeDumper):
    """Writes multi-line strings as blocks."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)

    def ignore_aliases(self, data: Any) -> bool:
        return True


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
    if not mount.is_absolute() or ":" in wanted.mount or ".." in mount.parts or str(mount) in ("/", CONFIG_DIRECTORY):
        yield (
            f"launch.kubernetes.mount={wanted.mount!r} must be an absolute directory other than / and "
            f"{CONFIG_DIRECTORY}, without ':' and '..', such as /shared."
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
