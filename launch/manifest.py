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
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
IMAGE = re.compile(
    r"([\w.-]+(:[0-9]{1,5})?/)?[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
    r"(:\w[\w.-]{0,127})?(@[\w+.-]+:[0-9a-f]{32,})?",
    re.ASCII,
)
"""Registry, lowercase path, tag, digest."""
QUANTITY = re.compile(r"[1-9][0-9]{0,11}(\.[0-9]{1,3})?([KMGTP]i|[kMGTP])")
"""An amount of memory with a unit; Kubernetes reads one without a unit as bytes."""
MAX_LABEL, MAX_SUBDOMAIN = 63, 253
MAX_NAME = 26
"""Characters of a job's name: "NAME-host-0-0.NAME" must fit in a label of Kubernetes, 63 characters."""
DIGEST_CHARACTERS = 6
Object = dict[str, Any]
"""A part of a manifest."""


def write_manifest(job: LaunchJob, config: str) -> str:
    """Returns the objects of a run as YAML, for `kubectl`.

    Args:
        job: The run to launch; the cluster makes its restarts.
        config: The resolved config that the pods read.

    Raises:
        UserError: The config cannot be launched on Kubernetes; the message lists all problems.
    """
    if problems := find_problems(job):
        raise UserError(
            "\n".join(["The config cannot be launched on Kubernetes:", *(f"  {each}" for each in problems)])
        )
    return yaml.dump_all(build_objects(job, config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def build_objects(job: LaunchJob, config: str) -> list[Object]:
    """Returns the objects of a run, in order of creation."""
    digest = int(hashlib.sha256(config.encode()).hexdigest(), 16) % 10**8
    config_map = f"{job_name(job)}-{digest:08}"  # another config has another name, so a running job keeps its own
    first: Object = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job) | {"name": config_map},
        "immutable": True,
        "data": {"config.yaml": config},
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
        "activeDeadlineSeconds": parse_time_limit(job.launch.time) or DEFAULT_DEADLINE_SECONDS,
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
        **({"envFrom": [{"secretRef": {"name": name}} for name in wanted.secrets]} if wanted.secrets else {}),
        "ports": [{"name": "coordinator", "containerPort": PORT, "protocol": "TCP"}],
        **_resources(job),
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    ids = {"runAsUser": wanted.user} if wanted.user else {}
    if group := wanted.group:
        ids |= {"runAsGroup": group, "fsGroup": group, "fsGroupChangePolicy": "OnRootMismatch"}
    return {
        "restartPolicy": "Never",
        **({"serviceAccountName": wanted.service_account} if wanted.service_account else {}),
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
    launch, memory = job.launch, job.launch.kubernetes.memory
    both = {"memory": memory} if memory else {}
    requests = ({"cpu": str(launch.cpus_per_process)} if launch.cpus_per_process else {}) | both
    limits = ({"nvidia.com/gpu": str(launch.gpus_per_process)} if launch.gpus_per_process else {}) | both
    resources = {name: amounts for name, amounts in (("requests", requests), ("limits", limits)) if amounts}
    return {"resources": resources} if resources else {}


def _restarts(job: LaunchJob) -> int:
    return job.request.restarts or job.launch.kubernetes.restarts


def _metadata(job: LaunchJob, *, queued: bool = False) -> Object:
    wanted = job.launch.kubernetes
    labels = _labels(job) | ({QUEUE: wanted.queue} if queued and wanted.queue else {})
    return {"name": job_name(job), **({"namespace": wanted.namespace} if wanted.namespace else {}), "labels": labels}


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


def is_label(text: str, max_length: int = MAX_LABEL) -> bool:
    """Returns whether a text is a DNS label that begins with a letter."""
    return len(text) <= max_length and LABEL.fullmatch(text) is not None


def is_subdomain(text: str) -> bool:
    """Returns whether a text is a valid name of an object: DNS labels joined by dots."""
    return len(text) <= MAX_SUBDOMAIN and SUBDOMAIN.fullmatch(text) is not None


def find_problems(job: LaunchJob) -> list[str]:
    """Returns everything that prevents a launch on Kubernetes."""
    wanted, found = job.launch.kubernetes, []
    if not IMAGE.fullmatch(wanted.image):
        found.append(
            f"launch.kubernetes.image={wanted.image!r} is not a valid container image. Use a lowercase path to an "
            "image that contains spmdkit, such as registry.example.org/team/train:1.4."
        )
    if wanted.name and not is_label(wanted.name, MAX_NAME):
        found.append(
            f"launch.kubernetes.name={wanted.name!r} is not a valid name: use lowercase letters, digits and '-', "
            f"beginning with a letter, at most {MAX_NAME} characters, such as {make_label(wanted.name, MAX_NAME)!r}."
        )
    namespace = wanted.namespace
    if namespace and not (is_subdomain(namespace) and "." not in namespace and len(namespace) <= MAX_LABEL):
        found.append(
            f"launch.kubernetes.namespace={namespace!r} is not a valid namespace: use lowercase letters, digits and "
            f"'-', at most {MAX_LABEL} characters."
        )
    names = [(key, getattr(wanted, key)) for key in ("queue", "volume_claim", "service_account")]
    for key, value in [*names, *(("secrets", name) for name in wanted.secrets)]:
        if (value or key == "secrets") and not is_subdomain(value):
            found.append(
                f"launch.kubernetes.{key}={value!r} is not a valid name: use lowercase letters, digits, '-' and '.'."
            )
    if wanted.memory and not QUANTITY.fullmatch(wanted.memory):
        found.append(
            f"launch.kubernetes.memory={wanted.memory!r} must be a number with a unit, such as '64Gi' or '500M'."
        )
    if not wanted.volume_claim:
        found.append(
            "launch.kubernetes.volume_claim is missing. Set it to a PersistentVolumeClaim that all pods can write "
            "(ReadWriteMany): run.dir must outlive a pod and be the same for all."
        )
    return [*found, *_secret_problems(job), *_directory_problems(job), *_process_problems(job), *_option_problems(job)]


def _secret_problems(job: LaunchJob) -> list[str]:
    """Checks that variables that look like secrets come from Secrets: many people can read a manifest."""
    names = [name for name, value in redact(job.launch.environment).items() if value is None]
    if not names or job.launch.kubernetes.secrets:
        return []
    literals = " ".join(f'--from-literal={name}="${name}"' for name in names)
    return [
        f"launch.environment: {', '.join(names)} must come from a Secret, because a manifest shows its values. Create "
        f"one (kubectl create secret generic my-secret {literals}), and set launch.kubernetes.secrets=[my-secret]."
    ]


def _option_problems(job: LaunchJob) -> list[str]:
    found = []
    if job.request.fresh:
        found.append("--fresh would start anew with every recreated pod. Set run.dir to another directory instead.")
    if job.request.wait:
        form = job.launch.kubernetes.form
        done = "Completed" if form == "jobset" else "Complete"
        found.append(
            "--wait is not available: the cluster keeps no exit code of the whole run. Remove it, and wait with: "
            f"kubectl wait --for=condition={done} {form}/{job_name(job)} --timeout=24h"
        )
    return found


def _directory_problems(job: LaunchJob) -> list[str]:
    mount, given = job.launch.kubernetes.mount, job.run_dir
    path = PurePosixPath(mount)
    if mount[:1] != "/" or ":" in mount or ".." in path.parts or str(path) in ("/", CONFIG_DIRECTORY):
        return [
            f"launch.kubernetes.mount={mount!r} must be an absolute directory other than / and {CONFIG_DIRECTORY}, "
            "without ':' and '..', such as /shared."
        ]
    if given.startswith("/") and not is_below(given, mount):
        return [
            f"run.dir={given} is not below launch.kubernetes.mount={mount}, the volume: it would be lost with the pod. "
            "Use a relative path, or one below that directory."
        ]
    return []


def _process_problems(job: LaunchJob) -> list[str]:
    launch, found = job.launch, []
    if launch.processes_per_node != 1:
        gpus = launch.processes_per_node * launch.gpus_per_process
        instead = f" and launch.gpus_per_process={gpus}" if gpus else ""
        found.append(
            f"launch.processes_per_node={launch.processes_per_node}, but a pod contains one process, which drives all "
            f"GPUs of the pod. Set launch.processes_per_node=1{instead}."
        )
    if launch.time and parse_time_limit(launch.time) is None:
        found.append(f"launch.time={launch.time!r} must be hours:minutes:seconds, such as '12:00:00'.")
    return found


def parse_time_limit(text: str) -> int | None:
    """Returns a time limit in seconds; the syntax is that of Slurm.

    Args:
        text: "minutes", "minutes:seconds", "hours:minutes:seconds", "days-hours", "days-hours:minutes", ...

    Returns:
        None if the syntax is invalid or the limit is zero.
    """
    match = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,6})(?::([0-5]?\d))?(?::([0-5]?\d))?", text)
    if match is None:
        return None
    days, *parts = match.groups()
    given = [int(part) for part in parts if part is not None]
    if days is None and len(given) < 3:
        given.insert(0, 0)
    hours, minutes, seconds = [*given, 0, 0][:3]
    return 86400 * int(days or 0) + 3600 * hours + 60 * minutes + seconds or None


def is_below(path: str, directory: str) -> bool:
    """Returns whether a path of the container is in a directory, judging by its text."""
    return PurePosixPath(path).is_relative_to(directory) and ".." not in PurePosixPath(path).parts
