"""What is found in the environments of every launcher, and what is refused."""

import pytest
from spmdkit.launch.startup import detection
from spmdkit.launch.startup.detection import find_job
from spmdkit.launch.startup.variables import job_port
from spmdkit.mesh.errors import UserError
from support.launch_cases import (
    BATCH,
    HYDRA,
    JAX,
    KERAS,
    OPEN_MPI,
    OPEN_MPI_HOSTS,
    OURS,
    POD_VARIABLES,
    SLURM,
    SLURM_ID,
    job_of,
    variables,
)

OTHER_RANK = SLURM.replace("SLURM_NTASKS=5 SLURM_PROCID=3", "SLURM_NTASKS=4 SLURM_PROCID=2")


@pytest.mark.parametrize(
    ("text", "source", "address", "who", "local"),
    [
        (OURS, "SPMDKIT_*", "host0:1234", (3, 4), (None, None)),
        (f"{OURS} SPMDKIT_LOCAL_RANK=1 SPMDKIT_LOCAL_PROCESSES=2", "SPMDKIT_*", "host0:1234", (3, 4), (1, 2)),
        (KERAS, "KERAS_DISTRIBUTION_*", "h0:1", (1, 2), (None, None)),
        (JAX, "JAX_*", "job-node-0-0.job:29500", (2, 4), (None, None)),
        (f"{JAX} JOB_COMPLETION_INDEX=2", "JAX_*", "job-node-0-0.job:29500", (2, 4), (None, None)),
        (OPEN_MPI, "Open MPI", f"127.0.0.1:{job_port('Open MPI 675479553')}", (1, 2), (1, 2)),
        (f"{OPEN_MPI_HOSTS} SPMDKIT_JOB_ADDRESSES=h0:9", "Open MPI", "h0:9", (1, 2), (0, 1)),
        (f"{OPEN_MPI_HOSTS} {BATCH}", "Open MPI", f"n1:{job_port('Open MPI 675479553')}", (1, 2), (0, 1)),
        (f"{HYDRA} SPMDKIT_JOB_ADDRESSES=127.0.0.1:9", "PMI", "127.0.0.1:9", (0, 2), (0, 2)),
        (f"{HYDRA} PMI_JOBID=9 SLURM_JOB_NODELIST=n1", "PMI", f"127.0.0.1:{job_port('PMI 9')}", (0, 2), (0, 2)),
        (f"{HYDRA[:-1]}1 PMI_JOBID=9 SLURM_JOB_NODELIST=n[3-4]", "PMI", f"n3:{job_port('PMI 9')}", (0, 2), (0, 1)),
        (SLURM, "Slurm", f"n1:{job_port(SLURM_ID)}", (3, 5), (1, 2)),
        (f"{SLURM} SLURM_STEP_NUM_TASKS=4", "Slurm", f"n1:{job_port(SLURM_ID)}", (3, 4), (1, 2)),
        (f"{SLURM} PMIX_RANK=3 PMIX_NAMESPACE=slurm.77", "Slurm", f"n1:{job_port(SLURM_ID)}", (3, 5), (1, 2)),
        (f"{SLURM} PMI_RANK=3 PMI_SIZE=5 PMI_JOBID=77.0", "PMI", f"n1:{job_port(SLURM_ID)}", (3, 5), (1, 2)),
        (SLURM.replace("n[1-2,7]", "n1"), "Slurm", f"127.0.0.1:{job_port(SLURM_ID)}", (3, 5), (1, None)),
        (f"{SLURM} JAX_COORDINATOR_ADDRESS=n1:5", "Slurm", "n1:5", (3, 5), (1, 2)),
        (f"{SLURM} SPMDKIT_NUM_PROCESSES=5", "Slurm", f"n1:{job_port(SLURM_ID)}", (3, 5), (1, 2)),
        (f"{SLURM} {OPEN_MPI}", "Open MPI", f"127.0.0.1:{job_port('Open MPI 675479553')}", (1, 2), (1, 2)),
        (f"{OURS} {OTHER_RANK}", "SPMDKIT_*", "host0:1234", (3, 4), (None, None)),
        (f"{BATCH} {OURS}", "SPMDKIT_*", "host0:1234", (3, 4), (None, None)),
        (POD_VARIABLES, "Kubernetes", "run-0.run:8476", (1, 2), (None, None)),
    ],
)
def test_finds_the_job(text, source, address, who, local):
    job = job_of(text)
    assert (job.source, str(job.address), (job.process_id, job.num_processes)) == (source, address, who)
    assert (job.local_rank, job.local_processes) == local
    assert job.is_shared


@pytest.mark.parametrize(
    "text",
    [
        "",
        "SLURM_PROCID=zero SLURM_NTASKS=4",  # not a job of Slurm
        "SLURM_JOB_ID=77 SLURM_PROCID=0",  # a batch script of one task
        "SLURM_JOB_ID=77 SLURM_STEP_ID=0 SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_STEP_NODELIST=n1",
        "OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0",
        "SPMDKIT_NUM_PROCESSES=1",
        f"{BATCH} SPMDKIT_NUM_PROCESSES=1",
        f"{SLURM} SPMDKIT_NUM_PROCESSES=1",
        "SPMDKIT_LOCAL_RANK=0 SPMDKIT_JOB_ID=x",
    ],
)
def test_finds_no_other_processes(text):
    job = find_job(variables(text))
    assert job is None or not job.is_shared


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("SPMDKIT_PROCESS_ID=1", r"^With SPMDKIT_PROCESS_ID=1, .* is one of several\. Missing: the number of process"),
        ("JAX_NUM_PROCESSES=4", "JAX_NUM_PROCESSES=4, .*Missing: the rank of this one .*, host:port of process 0"),
        (
            "SPMDKIT_NUM_PROCESSES=2 SPMDKIT_PROCESS_ID=0",
            r"PROCESSES=2, SPMDKIT_PROCESS_ID=0, .* Missing: host:port of process 0 \(SPMDKIT_JOB_ADDRESSES\)\. Set",
        ),
        ("JAX_COORDINATOR_ADDRESS=h:1", "^With JAX_COORDINATOR_ADDRESS=h:1, .* Missing: the number .*, the rank of"),
        ("SPMDKIT_LOCAL_RANK=1", "^With SPMDKIT_LOCAL_RANK=1, this process is one of several"),
        ("SPMDKIT_LOCAL_PROCESSES=2", "^With SPMDKIT_LOCAL_PROCESSES=2, this process is one of several"),
        ("SPMDKIT_JOB_ADDRESSES=host0", "SPMDKIT_JOB_ADDRESSES='host0' must be host:port"),
        (OURS.replace("=4", "=3"), r"SPMDKIT_PROCESS_ID=3 must be in 0 \.\. SPMDKIT_NUM_PROCESSES - 1 = 2"),
        (OURS.replace("=4", "=four"), "SPMDKIT_NUM_PROCESSES must be an integer of at least 1, got 'four'"),
        (OURS.replace("ID=3", "ID=-1"), "SPMDKIT_PROCESS_ID must be an integer of at least 0, got '-1'"),
        (OURS.replace("ID=3", f"ID={'9' * 500}"), "SPMDKIT_PROCESS_ID must be an integer of at least 0, got '9{60}'"),
        (f"{OURS} SPMDKIT_LOCAL_DEVICES=0-3", "LOCAL_DEVICES must be comma-separated integers such as 0,1, got '0-3'"),
        ("SPMDKIT_JOB_ADDRESSES=a:1,b:2 SPMDKIT_NUM_PROCESSES=3", "has 2 jobs, but num_processes is 3"),
        (f"{OURS} {JAX}", "SPMDKIT_PROCESS_ID=3 and JAX_PROCESS_ID=2 contradict each other"),
        (
            f"{OURS} JAX_COORDINATOR_ADDRESS=other:1",
            "SPMDKIT_JOB_ADDRESSES=host0:1234 and JAX_COORDINATOR_ADDRESS=other:1 contradict",
        ),
        (f"{SLURM} SPMDKIT_NUM_PROCESSES=4", "SPMDKIT_NUM_PROCESSES=4 and SLURM_NTASKS=5 contradict"),
        (BATCH, r"allocated 4 tasks \(SLURM_NTASKS\), but this is the batch script itself .*srun spmdkit train"),
        ("SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=2", r"allocated 2 tasks \(SLURM_JOB_NUM_NODES\)"),
        (SLURM.replace("SLURM_PROCID=3", ""), "SLURM_NTASKS=5, .*, SLURM_LOCALID=1, .* Missing: the rank of this one"),
        (SLURM.replace("n[1-2,7]", "n[1-2,7"), "SLURM_STEP_NODELIST='n.*is not a valid host list"),
        (OPEN_MPI_HOSTS, r"OMPI_COMM_WORLD_SIZE=2, .* Missing: host:port of process 0 \(SPMDKIT_JOB_ADDRESSES\)\."),
        (HYDRA, "Missing: host:port of process 0"),
        ("JOB_COMPLETION_INDEX=1", "JOB_COMPLETION_INDEX=1, this process is one of several"),
        ("PMIX_RANK=1", "PMIX_RANK=1, this process is one of several"),
        ("SPMDKIT_NUM_PROCESSES=1 SPMDKIT_PROCESS_ID=1", "SPMDKIT_PROCESS_ID=1 must be in"),
        ("PMI_RANK=1 PMI_JOBID=7 SPMDKIT_NUM_PROCESSES=2", "Missing: host:port of process 0"),
        (SLURM.replace("n[1-2,7]", "n[4-1]"), r"SLURM_STEP_NODELIST='n\[4-1\]' is not a valid host list"),
        (
            f"{OURS} SPMDKIT_LOCAL_RANK=2 SPMDKIT_LOCAL_PROCESSES=2",
            r"SPMDKIT_LOCAL_RANK=2 must be in 0 \.\. SPMDKIT_LOCAL_PROCESSES - 1 = 1",
        ),
    ],
)
def test_rejects_incomplete_and_contradicting_variables(text, says):
    with pytest.raises(UserError, match=says):
        find_job(variables(text))


def test_records_the_variable_of_each_value():
    job = job_of(f"{SLURM} JAX_COORDINATOR_ADDRESS=n1:5")
    ranks = {"num_processes": "SLURM_NTASKS", "process_id": "SLURM_PROCID", "local_rank": "SLURM_LOCALID"}
    others = {"address": "JAX_COORDINATOR_ADDRESS", "identity": "SLURM_JOB_ID", "nodes": "SLURM_STEP_NODELIST"}
    assert job.variables == {**ranks, **others}
    assert job.nodes == ("n1", "n2", "n7")


def test_launcher_around_a_complete_job_gives_no_identity():
    job = job_of(f"{OPEN_MPI} SPMDKIT_JOB_ADDRESSES=n1:5 SPMDKIT_NUM_PROCESSES=2 SPMDKIT_PROCESS_ID=1")
    assert (job.local_processes, job.identity) == (2, ""), "maybe it is not set in all processes"


def test_addresses_of_all_processes_give_their_hosts():
    assert job_of(KERAS).hosts == ("h0", "h1")


@pytest.mark.parametrize(
    ("visible", "text", "devices"),
    [
        (4, OPEN_MPI.replace("=2", "=4"), (1,)),  # one each
        (4, OPEN_MPI, (2, 3)),  # two each
        (1, OPEN_MPI, None),  # its launcher has bound it
        (3, OPEN_MPI, None),  # does not divide: the doctor says so
        (4, f"{OPEN_MPI} SPMDKIT_LOCAL_DEVICES=3,0", (3, 0)),
        (4, f"{OPEN_MPI} JAX_LOCAL_DEVICE_IDS=3", None),  # JAX reads that itself
        (4, f"{OPEN_MPI} CUDA_VISIBLE_DEVICES=2,3", (1,)),
        (4, OURS, None),
    ],
)
def test_gpus_are_divided_among_the_processes_of_a_host(visible, text, devices, monkeypatch):
    monkeypatch.setattr(detection, "count_gpus", lambda: visible)
    assert job_of(text).local_devices == devices


@pytest.mark.parametrize(
    ("variable", "of_host", "seen"),
    [(None, 8, 8), ("0,1", 8, 2), ("", 8, 0), ("-1", 8, 0), ("0,-1,2", 8, 1), ("GPU-abc", 8, 1), ("0,1", 0, 2)],
)
def test_counts_visible_gpus(variable, of_host, seen):
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert detection.count_visible_gpus(environ, of_host) == seen
