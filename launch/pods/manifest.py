"""The objects of a run on Kubernetes: one pod for each host, one process in each pod, all GPUs of the pod its own.

The config travels in a config map. The cluster gives each pod its index, which is the rank; the manifest gives the
number of processes and the address of the first pod. So nothing in a pod asks the API server, and no role is needed.

What follows the end of a pod is the cluster's work, told apart by the exit code:

    0          done
    2, 3       a mistake, or it diverged: the whole job fails, for another try would end alike
    75         stopped by a signal, as when its node is drained: the pod comes again, and that does not count
    disrupted  preempted, evicted, its node lost: likewise
    others     counted: a JobSet starts all pods again, a Job that one, while the rest end by themselves and come again
"""

import hashlib
import re
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

import yaml

from ...configs import Config, resolved_yaml
from ...mesh.errors import UserError
from ...training.ending.exits import DIVERGED, TRY_AGAIN, USER_MISTAKE
from ..places import Run
from .names import as_label, is_image, is_label, is_namespace, is_subdomain

PORT = 8476
"""Of the coordinator; a pod has its own address."""
CONFIG_FOLDER = "/config"
CONTAINER = "spmdkit"
GROUP = "host"
"""Name of the one group of pods in a JobSet."""
MOST_NAME = 26
"""Characters of a job's name: with it twice, "-host-0-0." makes a label of Kubernetes, of 63."""
GRACE_SECONDS = 30
"""Beyond timeouts.stop, for a pod to end."""
COORDINATOR = "metadata.annotations['jobset.sigs.k8s.io/coordinator']"
QUEUE = "kueue.x-k8s.io/queue-name"
Object = dict[str, Any]


def manifest(run: Run, config: Config) -> str:
    """The objects of a run as YAML, for `kubectl`.

    Args:
        run: What is launched; its restarts are the cluster's to make.
        config: Of the run; `launch` says what the pods are.

    Raises:
        UserError: The config cannot be launched on Kubernetes: everything that is wrong.
    """
    refuse(problems(run, config))
    return yaml.dump_all(objects(run, config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def refuse(found: list[str]) -> None:
    """Raises a UserError that says everything that is wrong, where anything is."""
    if found:
        raise UserError("\n".join(["The config cannot be launched on Kubernetes:", *(f"  {each}" for each in found)]))


def problems(run: Run, config: Config) -> list[str]:
    """What keeps a config from being launched on Kubernetes."""
    wanted, found = config.launch.kubernetes, []
    if not is_image(wanted.image):
        found.append(
            f"launch.kubernetes.image={wanted.image!r} must name a container image that has spmdkit, in "
            "small letters, such as registry.example.org/team/train:1.4."
        )
    if wanted.name and not is_label(wanted.name, MOST_NAME):
        found.append(
            f"launch.kubernetes.name={wanted.name!r} must be a label of DNS (small letters, digits, dashes, a letter "
            f"first) of at most {MOST_NAME} characters, such as {as_label(wanted.name, MOST_NAME)!r}."
        )
    if wanted.namespace and not is_namespace(wanted.namespace):
        found.append(
            f"launch.kubernetes.namespace={wanted.namespace!r} is no namespace: small letters, digits and dashes, of "
            "which at most 63 are allowed."
        )
    for key in ("queue", "volume_claim"):
        value = getattr(wanted, key)
        if value and not is_subdomain(value):
            found.append(f"launch.kubernetes.{key}={value!r} is no name: small letters, digits, dashes and dots.")
    if not wanted.volume_claim:
        found.append(
            "launch.kubernetes.volume_claim must name a PersistentVolumeClaim that all pods can write (ReadWriteMany): "
            "run.dir has to outlive a pod and to be the same for all."
        )
    return found + _folder_problems(config) + _process_problems(config) + _option_problems(run, config)


def _option_problems(run: Run, config: Config) -> list[str]:
    """What is wrong with the options of the command."""
    found = []
    if run.fresh:
        found.append("--fresh would start anew with every pod that comes again. Set run.dir to another folder instead.")
    if run.wait:
        form = config.launch.kubernetes.form
        done = "Completed" if form == "jobset" else "Complete"
        found.append(
            "--wait: this command ends when the cluster has taken the run, which keeps no exit code of all of it. "
            f"Leave it out, and wait with: kubectl wait --for=condition={done} {form}/{job_name(config)} --timeout=24h"
        )
    return found


def _folder_problems(config: Config) -> list[str]:
    mount, given = config.launch.kubernetes.mount, config.run.dir
    folder = PurePosixPath(mount)
    if mount[:1] != "/" or ":" in mount or ".." in folder.parts or str(folder).lstrip("/") in ("", CONFIG_FOLDER[1:]):
        return [
            f"launch.kubernetes.mount={mount!r} must be a folder of the container's own, without a colon or '..', such "
            "as /shared."
        ]
    if given.startswith("/") and not _is_below(given, mount):
        return [
            f"run.dir={given} is not below launch.kubernetes.mount={mount}, where the volume is: it would be lost with "
            "the pod. Write it relative, or below that folder."
        ]
    return []


def _process_problems(config: Config) -> list[str]:
    launch, found = config.launch, []
    if launch.processes_per_node != 1:
        gpus = launch.processes_per_node * launch.gpus_per_process
        instead = f" and launch.gpus_per_process={gpus}" if gpus else ""
        found.append(
            f"launch.processes_per_node={launch.processes_per_node}, but a pod holds one process, which drives all "
            f"GPUs of the pod. Set launch.processes_per_node=1{instead}."
        )
    if launch.time and deadline(launch.time) is None:
        found.append(f"launch.time={launch.time!r} must be hours:minutes:seconds, such as '12:00:00'.")
    return found


def deadline(time: str) -> int | None:
    """Seconds of a time limit, as other schedulers read it too.

    Args:
        time: "minutes", "minutes:seconds", "hours:minutes:seconds"; after "days-", "hours" and what may follow it.

    Returns:
        None where the text is of another form, or no time at all.
    """
    match = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,6})(?::([0-5]?\d))?(?::([0-5]?\d))?", time)
    if match is None:
        return None
    days, *parts = match.groups()
    given = [int(part) for part in parts if part is not None]
    if days is None and len(given) < 3:
        given.insert(0, 0)
    hours, minutes, seconds = [*given, 0, 0][:3]
    return 86400 * int(days or 0) + 3600 * hours + 60 * minutes + seconds or None


def job_name(config: Config) -> str:
    """What the job is called: as the config says, or after the folder of the run."""
    return config.launch.kubernetes.name or as_label(PurePosixPath(config.run.dir).name, MOST_NAME)


def objects(run: Run, config: Config) -> list[Object]:
    """The objects of a run, in the order in which they are made."""
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(config) | {"name": config_name(config)},
        "immutable": True,
        "data": {"config.yaml": config_text(config)},
    }
    if config.launch.kubernetes.form == "jobset":
        return [config_map, _jobset(run, config)]
    return [config_map, _service(config), _job(run, config)]


def config_name(config: Config) -> str:
    """What the config map is called: another config makes another, so a job under way keeps its own."""
    digest = int(hashlib.sha256(config_text(config).encode()).hexdigest(), 16) % 10**8
    return f"{job_name(config)}-{digest:08}"


def config_text(config: Config) -> str:
    """The resolved config as the pods read it: what is relative starts from the volume."""
    mount = config.launch.kubernetes.mount
    root = config.run.root if _is_below(config.run.root, mount) else mount
    there = replace(config.run, dir=str(PurePosixPath(mount) / config.run.dir), root=root)
    return resolved_yaml(replace(config, run=there))


def _jobset(run: Run, config: Config) -> Object:
    job = _job_spec(config, 0, {"fieldRef": {"fieldPath": COORDINATOR}})
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(config, queued=True),
        "spec": {
            "coordinator": {"replicatedJob": GROUP, "jobIndex": 0, "podIndex": 0},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": run.restarts,
                "restartStrategy": "BlockingRecreate",
                "rules": [
                    {
                        "name": "hopeless",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"],
                    }
                ],
            },
            "replicatedJobs": [{"name": GROUP, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _job(run: Run, config: Config) -> Object:
    name = job_name(config)
    spec = _job_spec(config, run.restarts * config.launch.nodes, f"{name}-0.{name}")
    spec["template"]["spec"]["subdomain"] = name
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(config, queued=True),
        "spec": spec,
    }


def _service(config: Config) -> Object:
    """Gives the pods of a Job names; those of a JobSet have them from its controller."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(config),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": job_name(config)},
            "ports": [{"name": "coordinator", "port": PORT, "protocol": "TCP"}],
        },
    }


def _job_spec(config: Config, failures: int, coordinator: str | Object) -> Object:
    """The Indexed Job of all pods.

    Args:
        config: Of the run.
        failures: Pods that may fail, beside those that do not count.
        coordinator: Host name of the first pod, or where its pod finds it.
    """
    nodes, seconds = config.launch.nodes, deadline(config.launch.time)
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": failures,
        **({"activeDeadlineSeconds": seconds} if seconds else {}),
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": _exit_codes(USER_MISTAKE, DIVERGED)},
                {"action": "Ignore", "onExitCodes": _exit_codes(TRY_AGAIN)},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"metadata": {"labels": _labels(config)}, "spec": _pod(config, coordinator)},
    }


def _exit_codes(*codes: int) -> Object:
    return {"containerName": CONTAINER, "operator": "In", "values": list(codes)}


def _pod(config: Config, coordinator: str | Object) -> Object:
    launch, wanted = config.launch, config.launch.kubernetes
    volumes = [
        {"name": "config", "configMap": {"name": config_name(config)}},
        {"name": "shared", "persistentVolumeClaim": {"claimName": wanted.volume_claim}},
    ]
    mounts = [
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "shared", "mountPath": wanted.mount},
    ]
    if launch.gpus_per_process:
        volumes.append({"name": "memory", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "memory", "mountPath": "/dev/shm"})  # NCCL's; a container has 64 MiB by itself
    container = {
        "name": CONTAINER,
        "image": wanted.image,
        "workingDir": wanted.mount,
        "command": _command(config),
        "env": _environment(config, coordinator),
        "ports": [{"name": "coordinator", "containerPort": PORT, "protocol": "TCP"}],
        **_resources(config),
        "volumeMounts": mounts,
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": config.timeouts.stop + GRACE_SECONDS,
        "containers": [container],
        "volumes": volumes,
    }


def _command(config: Config) -> list[str]:
    launch = config.launch
    words = [*launch.prefix, launch.python or "python", "-P", "-m", "spmdkit", "train", f"{CONFIG_FOLDER}/config.yaml"]
    if not launch.setup:
        return words
    return ["bash", "-e", "-c", "\n".join([*launch.setup, 'exec "$@"']), "bash", *words]


def _environment(config: Config, coordinator: str | Object) -> list[Object]:
    """The variables of a pod; its index comes from Kubernetes, as JOB_COMPLETION_INDEX."""
    host = {"value": coordinator} if isinstance(coordinator, str) else {"valueFrom": coordinator}
    return [
        *({"name": name, "value": value.replace("$(", "$$(")} for name, value in config.launch.environment.items()),
        {"name": "SPMDKIT_COORDINATOR", **host},
        {"name": "SPMDKIT_JOB_ADDRESSES", "value": f"$(SPMDKIT_COORDINATOR):{PORT}"},
        {"name": "SPMDKIT_NUM_PROCESSES", "value": str(config.launch.nodes)},
        {"name": "PYTHONUNBUFFERED", "value": "1"},
    ]


def _resources(config: Config) -> Object:
    launch, resources = config.launch, {}
    if launch.cpus_per_process:
        resources["requests"] = {"cpu": str(launch.cpus_per_process)}
    if launch.gpus_per_process:
        resources["limits"] = {"nvidia.com/gpu": str(launch.gpus_per_process)}
    return {"resources": resources} if resources else {}


def _metadata(config: Config, *, queued: bool = False) -> Object:
    wanted = config.launch.kubernetes
    labels = _labels(config) | ({QUEUE: wanted.queue} if queued and wanted.queue else {})
    where = {"namespace": wanted.namespace} if wanted.namespace else {}
    return {"name": job_name(config), **where, "labels": labels}


def _labels(config: Config) -> dict[str, str]:
    return {"app.kubernetes.io/name": "spmdkit", "app.kubernetes.io/instance": job_name(config)}


def _is_below(path: str, folder: str) -> bool:
    return PurePosixPath(path).is_relative_to(folder) and ".." not in PurePosixPath(path).parts


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are, line by line."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(str, _Dumper.represent_str)
