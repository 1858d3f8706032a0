"""The objects of a run on Kubernetes: one pod for each host, one process in each pod, all GPUs of the pod its own.

The config travels in a config map. The cluster gives each pod its index, which is the rank; the manifest gives the
number of processes and the address of the first pod. So nothing in a pod asks the API server, and no role is needed.

What follows the end of a pod is the cluster's work, told apart by the exit code:

    0          done
    2, 3       a mistake, or it diverged: the whole job fails, for another try would end alike
    disrupted  preempted, evicted, its node lost: the pod comes again, and that is not counted; the others end with 75
    others     75 too, for a full disk ends with it: counted, and limited. A JobSet starts all pods again, a Job that
               one, while the rest end by themselves and come again
"""

from typing import Any

import yaml

from ...configs import Config
from ...training.ending.exits import DIVERGED, USER_MISTAKE
from ..places import Run
from .names import job_name
from .pod import CONTAINER, PORT, Object, config_name, config_text, pod
from .problems import deadline, problems, refuse

GROUP = "host"
"""Name of the one group of pods in a JobSet."""
COORDINATOR = "metadata.annotations['jobset.sigs.k8s.io/coordinator']"
QUEUE = "kueue.x-k8s.io/queue-name"
DEADLINE_SECONDS = 7 * 86400
"""Time limit of a job without `launch.time`, from its start or restart."""


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
                "maxRestarts": _restarts(run, config),
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
    spec = _job_spec(config, _restarts(run, config) * config.launch.nodes, f"{name}-0.{name}")
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
    nodes = config.launch.nodes
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": failures,
        "activeDeadlineSeconds": deadline(config.launch.time) or DEADLINE_SECONDS,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": _exit_codes(USER_MISTAKE, DIVERGED)},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"metadata": {"labels": _labels(config)}, "spec": pod(config, coordinator)},
    }


def _restarts(run: Run, config: Config) -> int:
    return run.restarts or config.launch.kubernetes.restarts


def _exit_codes(*codes: int) -> Object:
    return {"containerName": CONTAINER, "operator": "In", "values": list(codes)}


def _metadata(config: Config, *, queued: bool = False) -> Object:
    wanted = config.launch.kubernetes
    labels = _labels(config) | ({QUEUE: wanted.queue} if queued and wanted.queue else {})
    where = {"namespace": wanted.namespace} if wanted.namespace else {}
    return {"name": job_name(config), **where, "labels": labels}


def _labels(config: Config) -> dict[str, str]:
    return {"app.kubernetes.io/name": "spmdkit", "app.kubernetes.io/instance": job_name(config)}


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are, line by line."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(str, _Dumper.represent_str)
