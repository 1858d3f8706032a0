"""Runs on a real Slurm: the losses of `--on local`, and what follows a kill, the time limit, scancel and a mistake."""

import json
import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.processes import assert_nothing_left
from support.runs import assert_same_arrays, losses, metrics, source_module, state_arrays, trained, write_config
from support.slurm_lab import running_slurm

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.cluster]

TWO = {"nodes": 2, "time": "10:00", "slurm": {"restarts": 2}}
FAULTY = source_module(
    """
    import os, signal, time

    FAULT = os.environ.get("FAULT", "") if "SLURM_RESTART_COUNT" not in os.environ else ""
    """,
    take="""
    if FAULT == "slow":
        time.sleep(0.25)
    if FAULT == "kill" and self.taken == 9 and os.environ.get("SLURM_PROCID") == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    """,
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with running_slurm(tmp_path_factory.mktemp("slurm")) as lab:
        yield lab


def faulty_config(folder, launch=TWO, **sections):
    (folder / "faulty.py").write_text(FAULTY)
    return write_config(folder, data={"source": "faulty:rows"}, launch=launch, **sections)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The folder of a run of 2 processes that nothing happened to."""
    config = faulty_config(tmp_path_factory.mktemp("sound"))
    trained("launch", config, "--on", "local:2x4")
    return config.parent / "run"


def job_of(ended: subprocess.CompletedProcess[str]) -> str:
    assert ended.stdout.strip().isdecimal(), ended.stdout + ended.stderr
    return ended.stdout.strip()


def waited(slurm, folder, *words, timeout: float = 120, **variables) -> subprocess.CompletedProcess[str]:
    """Submits the printed script with `sbatch --wait`, as docs/slurm-and-mpi.md shows."""
    printed = slurm.launch(*words, "--on", "slurm", "--dry-run")
    (folder / "logs").mkdir(parents=True)
    (folder.parent / "job.sh").write_text(printed.stdout)
    return slurm.run("sbatch", "--parsable", "--wait", folder.parent / "job.sh", timeout=timeout, **variables)


def log_of(folder, job: str) -> str:
    return (folder / "logs" / f"slurm-{job}.log").read_text()


def everything_said(folder) -> str:
    return "\n".join(f"--- {path}\n{path.read_text(errors='replace')}" for path in folder.glob("logs/*"))


FOUR = {
    "nodes": 2,
    "processes_per_node": 2,
    "gpus_per_process": 1,
    "environment": {"MINE": "it's 1 $HOME", "MY_TOKEN": "abc $x"},
    "prefix": ["bash", "-c", 'echo "GPU $CUDA_VISIBLE_DEVICES, $MINE, $MY_TOKEN"; exec "$@"', "bash"],
}


@pytest.mark.parametrize(
    ("launch", "devices", "name"), [(TWO, 4, "run"), (FOUR, 2, 'a run\'s #1 of "mine" 50% $HOME `id`')]
)
def test_losses_match_local_processes(launch, devices, name, slurm, tmp_path):
    config = write_config(tmp_path, launch=launch)
    processes = 8 // devices
    folder = tmp_path / name
    words = (f"run.simulate={devices}", f"run.dir={json.dumps(str(folder))}")
    job = job_of(slurm.launch(config, *words, "--on", "slurm"))
    slurm.wait_for(job, "COMPLETED", seconds=120)
    trained("launch", config, f"run.dir={tmp_path}/local", "--on", f"local:{processes}x{devices}")
    assert metrics(folder) == metrics(tmp_path / "local")
    ours, others = (state_arrays(config, 12, each / "checkpoints") for each in (folder, tmp_path / "local"))
    assert_same_arrays(ours, others)
    logs = {path.name for path in (folder / "logs").iterdir()}
    assert {f"rank-{rank}.log" for rank in range(processes)} | {f"slurm-{job}.log"} <= logs
    assert "step 12/12" in (folder / "logs" / "rank-0.log").read_text()
    if launch is FOUR:
        said = [(folder / "logs" / f"rank-{rank}.log").read_text().splitlines()[0] for rank in range(4)]
        assert sorted(said) == ["GPU 0, it's 1 $HOME, abc $x"] * 2 + ["GPU 1, it's 1 $HOME, abc $x"] * 2
    script = (folder / "slurm.sh").read_text()
    assert script.startswith("#!/bin/bash")
    assert "abc $x" not in script
    assert_nothing_left(tmp_path)


def test_slurm_accepts_every_script_option(slurm, tmp_path):
    config = write_config(tmp_path, launch=TWO)
    options = ("launch.cpus_per_process=2", "launch.slurm.options=['--comment=a \"b\" #c', '--exclusive']")
    (tmp_path / "logs").mkdir()
    printed = slurm.launch(config, "run.simulate=4", *options, "--on", "slurm:other", "--dry-run")
    assert printed.returncode == 0, printed.stderr
    script = tmp_path / "job.sh"
    script.write_text(printed.stdout)
    ended = slurm.run("sbatch", "--test-only", script)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"to start at .* using \d+ processors on nodes n\[1-2\] in partition other", ended.stderr)
    job = slurm.asked("sbatch", "--parsable", "--hold", str(script))
    shown = slurm.asked("scontrol", "show", "job", job)
    slurm.asked("scancel", job)
    for line in ("JobName=run", 'Comment=a "b" #c', "CPUs/Task=2", "TimeLimit=00:10:00", "NumNodes=2", "Requeue=1"):
        assert line in shown, shown


def test_requeues_after_killed_process_and_resumes_bitwise(slurm, sound, tmp_path):
    config = faulty_config(tmp_path)
    folder = tmp_path / "run"
    ended = waited(slurm, folder, config, "run.simulate=4", FAULT="kill", timeout=200)
    assert ended.returncode == 0, ended.stderr + everything_said(folder)
    said = log_of(folder, job_of(ended))
    assert "rank 1 ended first: Killed." in said
    assert re.search(r"requeueing the job, to resume from step (0|4|8)\n", said)
    assert ", start 2 on n" in said
    assert metrics(folder) == metrics(sound)
    assert_nothing_left(tmp_path)


def test_ends_job_after_mistake(slurm, tmp_path):
    config = write_config(tmp_path, launch=TWO)
    ended = waited(slurm, tmp_path / "run", config, "run.simulate=4", "train.global_batch=10000")
    assert ended.returncode == 2, ended.stderr
    said = log_of(tmp_path / "run", job_of(ended))
    assert "ended first: Exited with exit code 2." in said
    assert "error: train.global_batch=10000 rows, but" in said
    assert ", start 2 on" not in said


def test_saves_before_time_limit_and_requeues(slurm, tmp_path):
    """SIGUSR1 comes up to a minute before the warning: after the first step, even on a busy machine, and long before
    the end of the slow data."""
    steps = 480
    sections = {
        "train": {"steps": steps, "global_batch": 16},
        "checkpoint": {"every": 0},
        "eval": {"every": 0, "batches": 2},
        "launch": {**TWO, "time": "2", "slurm": {"warn_seconds": 20}},
    }
    config = faulty_config(tmp_path, **sections)
    job, folder = job_of(slurm.launch(config, "run.simulate=4", "--on", "slurm", FAULT="slow")), tmp_path / "run"
    slurm.wait_for(job, "COMPLETED", seconds=300)
    said = log_of(folder, job)
    everything = everything_said(folder)  # the job's log repeats the words of the rank that ended first, either of them
    stopped = re.search(r"Stopped by SIGUSR1 to rank \d after step (\d+) of", everything)
    assert stopped, everything
    assert f"requeueing the job, to resume from step {stopped[1]}\n" in said
    assert 0 < int(stopped[1]) < steps
    trained("launch", config, f"run.dir={tmp_path}/local", "--on", "local:2x4")
    assert losses(folder) == losses(tmp_path / "local")
    assert_same_arrays(*(state_arrays(config, steps, each / "checkpoints") for each in (folder, tmp_path / "local")))
    assert_nothing_left(tmp_path)


def test_scancel_saves_and_stops_all_processes(slurm, tmp_path):
    config = faulty_config(tmp_path, train={"steps": 400, "global_batch": 16}, checkpoint={"every": 0})
    job = job_of(slurm.launch(config, "run.simulate=4", "--on", "slurm", FAULT="slow"))
    folder, deadline = tmp_path / "run", time.monotonic() + 90
    while not (folder / "metrics.jsonl").exists() or len(losses(folder)) < 5:
        assert time.monotonic() < deadline, everything_said(folder)
        time.sleep(0.2)
    slurm.asked("scancel", job)
    slurm.wait_for(job, "CANCELLED")
    assert_nothing_left(tmp_path)
    (step,) = (int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdecimal())
    assert step >= 5
    said = (folder / "logs/rank-0.log").read_text()  # every rank got the signal; the first that tells it is named
    assert re.search(rf"Stopped by SIGTERM to rank [01] after step {step} of 400; saved\.", said), said
    time.sleep(8)
    assert slurm.state(job) == "CANCELLED", "it did not come back"
    assert ", start 2 on" not in log_of(folder, job)


def task_and_daemon(job: str, rank: int) -> tuple[int, int]:
    """The numbers of the process of a rank, and of its parent, a process of Slurm."""
    wanted = {f"SLURM_JOB_ID={job}", f"SLURM_PROCID={rank}"}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            is_daemon = Path(f"/proc/{parent}/cmdline").read_bytes().startswith(b"slurmstepd")
            if is_daemon and wanted <= set((folder / "environ").read_text(errors="replace").split("\0")):
                return int(folder.name), parent
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.parametrize("lives", [True, False], ids=["its task lives on", "its task ends too"])
def test_ends_job_after_killed_step_daemon(lives, slurm, tmp_path):
    sections = {"train": {"steps": 40, "global_batch": 16}, "checkpoint": {"every": 10}, "timeouts": {"shutdown": 5}}
    config = faulty_config(tmp_path, **sections)
    job = job_of(slurm.launch(config, "run.simulate=4", "--on", "slurm", FAULT="slow"))
    folder, deadline = tmp_path / "run", time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or len(losses(folder)) < 5:
        assert time.monotonic() < deadline, everything_said(folder)
        time.sleep(0.2)
    task, daemon = task_and_daemon(job, 1)
    os.kill(daemon, signal.SIGKILL)
    if not lives:
        os.kill(task, signal.SIGKILL)
    slurm.wait_for(job, "COMPLETED", seconds=180)
    said = log_of(folder, job)
    assert "srun: error: Timed out waiting for job step to complete" in said
    assert ("requeueing the job" in said) is not lives, said
    assert max(losses(folder)) == 40
    assert_nothing_left(tmp_path)


def test_reports_unreachable_controller(slurm, tmp_path):
    conf = (slurm.folder / "slurm.conf").read_text()
    (tmp_path / "slurm.conf").write_text(re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=1", conf))
    config = write_config(tmp_path, launch=TWO)
    ended = slurm.launch(config, "run.simulate=4", "--on", "slurm", SLURM_CONF=str(tmp_path / "slurm.conf"))
    assert ended.returncode == 75, ended.stderr
    assert "Slurm cannot take the job now: Batch job submission failed: Unable to contact" in ended.stderr
