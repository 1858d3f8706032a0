"""Manifests of a run of four pods, read back."""

import yaml
from spmdkit.launch.places import Run
from spmdkit.launch.pods.manifest import manifest

POD = {
    "kubernetes": {"image": "registry.example.org/train:1", "volume_claim": "runs", "queue": "team-a"},
    "nodes": 4,
    "gpus_per_process": 8,
    "cpus_per_process": 16,
    "time": "12:00:00",
    "environment": {"NCCL_DEBUG": "WARN", "PRICE": "$(HOME) 8"},
    "setup": ["ulimit -c 0"],
}
MESH = {"run": {"simulate": 2, "dir": "runs/My Run"}, "strategy": {"data": 8}}


def written(config, **run) -> list[dict]:
    return list(yaml.safe_load_all(manifest(Run("tiny.yaml", **run), config)))


def job_spec(found: list[dict]) -> dict:
    spec = found[-1]["spec"]
    return spec["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in spec else spec


def container(found: list[dict]) -> dict:
    (only,) = job_spec(found)["template"]["spec"]["containers"]
    return only
