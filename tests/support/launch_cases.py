"""Environment variables that launchers set, and manifests of a run of four pods."""

from pathlib import Path

import yaml
from spmdkit.launch import kubernetes
from spmdkit.launch.launchers import LaunchRequest
from spmdkit.launch.startup.detection import find_job
from spmdkit.launch.startup.variables import Job


def job_of(text: str) -> Job:
    """The job of a process with these environment variables."""
    job = find_job(variables(text))
    assert job is not None
    return job


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


OURS = "SPMDKIT_JOB_ADDRESSES=host0:1234 SPMDKIT_NUM_PROCESSES=4 SPMDKIT_PROCESS_ID=3"
KERAS = "KERAS_DISTRIBUTION_JOB_ADDRESSES=h0:1,h1:2 KERAS_DISTRIBUTION_PROCESS_ID=1"
JAX = "JAX_COORDINATOR_ADDRESS=job-node-0-0.job:29500 JAX_NUM_PROCESSES=4 JAX_PROCESS_ID=2"
OPEN_MPI = (
    "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
    "PMIX_NAMESPACE=675479553 PMIX_RANK=1"
)
OPEN_MPI_HOSTS = OPEN_MPI.replace("LOCAL_SIZE=2", "LOCAL_SIZE=1").replace("LOCAL_RANK=1", "LOCAL_RANK=0")
HYDRA = "PMI_SIZE=2 PMI_RANK=0 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2"
SLURM = (
    "SLURM_JOB_ID=77 SLURM_STEP_ID=0 SLURM_NTASKS=5 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1 "
    "SLURM_STEP_NODELIST=n[1-2,7] SLURM_JOB_NODELIST=n[1-8] SLURM_STEP_TASKS_PER_NODE=2(x2),1"
)
BATCH = "SLURM_JOB_ID=77 SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_JOB_NODELIST=n[1-2]"
POD_VARIABLES = "JOB_COMPLETION_INDEX=1 SPMDKIT_JOB_ADDRESSES=run-0.run:8476 SPMDKIT_NUM_PROCESSES=2"
SLURM_ID = "slurm 77.0 restart 0"


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


def written(config: Path, *overrides: str, **request) -> list[dict]:
    return list(yaml.safe_load_all(kubernetes.describe(LaunchRequest(str(config), overrides, **request), None)))


def job_spec(found: list[dict]) -> dict:
    spec = found[-1]["spec"]
    return spec["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in spec else spec


def container(found: list[dict]) -> dict:
    (only,) = job_spec(found)["template"]["spec"]["containers"]
    return only
