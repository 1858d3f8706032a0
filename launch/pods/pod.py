"""One pod: a container with all its GPUs, the config from a config map, the folder of the run from a volume."""

import hashlib
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from ...configs import Config, resolved_yaml
from ...configs.secret_variables import redact
from .names import job_name
from .problems import CONFIG_FOLDER, is_below

PORT = 8476
"""Of the coordinator; a pod has its own address."""
CONTAINER = "spmdkit"
GRACE_SECONDS = 30
"""Beyond timeouts.stop, for a pod to end."""
Object = dict[str, Any]
"""A part of a manifest."""


def config_name(config: Config) -> str:
    """What the config map is called: another config makes another, so a job under way keeps its own."""
    digest = int(hashlib.sha256(config_text(config).encode()).hexdigest(), 16) % 10**8
    return f"{job_name(config)}-{digest:08}"


def config_text(config: Config) -> str:
    """The resolved config as the pods read it: what is relative starts from the volume."""
    mount = config.launch.kubernetes.mount
    root = config.run.root if is_below(config.run.root, mount) else mount
    there = replace(config.run, dir=str(PurePosixPath(mount) / config.run.dir), root=root)
    return resolved_yaml(replace(config, run=there))


def pod(config: Config, coordinator: str | Object) -> Object:
    """What a pod is made from.

    Args:
        config: Of the run.
        coordinator: Host name of the first pod, or where its pod finds it.
    """
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
        **({"envFrom": [{"secretRef": {"name": name}} for name in wanted.secrets]} if wanted.secrets else {}),
        "ports": [{"name": "coordinator", "containerPort": PORT, "protocol": "TCP"}],
        **_resources(config),
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    return {
        "restartPolicy": "Never",
        **({"serviceAccountName": wanted.service_account} if wanted.service_account else {}),
        "automountServiceAccountToken": False,
        "securityContext": _security_context(config),
        "terminationGracePeriodSeconds": config.timeouts.stop + GRACE_SECONDS,
        "containers": [container],
        "volumes": volumes,
    }


def _security_context(config: Config) -> Object:
    """The rights of a pod: those of the profile "restricted" of Kubernetes' pod security standards."""
    user, group = config.launch.kubernetes.user, config.launch.kubernetes.group
    return {
        "runAsNonRoot": True,
        **({"runAsUser": user} if user else {}),
        **({"runAsGroup": group, "fsGroup": group, "fsGroupChangePolicy": "OnRootMismatch"} if group else {}),
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _command(config: Config) -> list[str]:
    launch = config.launch
    words = [*launch.prefix, launch.python or "python", "-P", "-m", "spmdkit", "train", f"{CONFIG_FOLDER}/config.yaml"]
    if not launch.setup:
        return words
    return ["bash", "-e", "-c", "\n".join([*launch.setup, 'exec "$@"']), "bash", *words]


def _environment(config: Config, coordinator: str | Object) -> list[Object]:
    """The variables of a pod; its index comes from Kubernetes, as JOB_COMPLETION_INDEX, and secrets from Secrets."""
    host = {"value": coordinator} if isinstance(coordinator, str) else {"valueFrom": coordinator}
    given = {name: value for name, value in redact(config.launch.environment).items() if value is not None}
    return [
        *({"name": name, "value": value.replace("$(", "$$(")} for name, value in given.items()),
        {"name": "SPMDKIT_COORDINATOR", **host},
        {"name": "SPMDKIT_JOB_ADDRESSES", "value": f"$(SPMDKIT_COORDINATOR):{PORT}"},
        {"name": "SPMDKIT_NUM_PROCESSES", "value": str(config.launch.nodes)},
        {"name": "PYTHONUNBUFFERED", "value": "1"},
    ]


def _resources(config: Config) -> Object:
    launch, memory = config.launch, {"memory": config.launch.kubernetes.memory}
    memory = memory if memory["memory"] else {}
    requests = ({"cpu": str(launch.cpus_per_process)} if launch.cpus_per_process else {}) | memory
    limits = ({"nvidia.com/gpu": str(launch.gpus_per_process)} if launch.gpus_per_process else {}) | memory
    resources = {name: amounts for name, amounts in (("requests", requests), ("limits", limits)) if amounts}
    return {"resources": resources} if resources else {}
