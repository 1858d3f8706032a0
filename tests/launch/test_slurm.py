"""`spmdkit launch --on slurm` before there is a job: what it refuses, and how it reads what Slurm says."""

import pytest
from runs import spmdkit, write_config
from spmdkit.launch import slurm
from spmdkit.launch.places import Run, find_place
from spmdkit.launch.slurm import ClusterUnavailable, SlurmTarget, State, ask, last_start, submit

SIZES = {"nodes": 2, "processes_per_node": 2}


@pytest.fixture
def scheduler(tmp_path, monkeypatch):
    """Puts a command of Slurm on PATH that says something and ends with a code."""
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")

    def put(name: str, out: str = "", err: str = "", code: int = 0) -> None:
        (tools / "out").write_text(out)
        (tools / "err").write_text(err)
        (tools / name).write_text(f"#!/bin/sh\ncat {tools}/out; cat {tools}/err >&2; env >{tools}/env; exit {code}\n")
        (tools / name).chmod(0o755)

    return put


def test_the_forms_of_a_target():
    assert find_place("slurm") == (slurm, SlurmTarget(""))
    assert find_place("slurm:gpu-a100") == (slurm, SlurmTarget("gpu-a100"))
    assert find_place("slurm:low,high")[1].partition == "low,high"


@pytest.mark.parametrize("text", ["slurm:a b", "slurm:--qos=x", "slurm:a\nb", "slurm:'"])
def test_what_is_no_partition(text):
    with pytest.raises(ValueError, match=r"is not a target; give slurm\[:PARTITION\]"):
        find_place(text)


def test_a_config_that_cannot_work_is_refused_before_there_is_a_script(tmp_path):
    config = write_config(tmp_path, launch=SIZES)
    with pytest.raises(ValueError, match="4 processes with 8 devices each give 32"):
        slurm.launch(Run(str(config)), SlurmTarget(""))
    assert not (tmp_path / "run").exists()


def test_gpus_that_the_strategy_does_not_use_are_told(tmp_path):
    config = write_config(tmp_path, launch={**SIZES, "gpus_per_process": 1}, run={"simulate": 0})
    with pytest.raises(ValueError, match=r"launch\.processes_per_node=2 x launch\.gpus_per_process=1 gives 4 GPUs"):
        slurm.describe(Run(str(config)), SlurmTarget(""))


def test_without_slurm_nothing_is_written(tmp_path):
    config = write_config(tmp_path, launch=SIZES)
    ended = spmdkit("launch", config, "run.simulate=2", "--on", "slurm", PATH=str(tmp_path))
    assert ended.returncode == 2
    assert "There is no sbatch on PATH" in ended.stderr
    assert not (tmp_path / "run").exists()


def test_a_dry_run_prints_the_script_alone(tmp_path):
    config = write_config(tmp_path, launch=SIZES)
    ended = spmdkit("launch", config, "run.simulate=2", "--on", "slurm:gpu", "--dry-run", PATH=str(tmp_path))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("#!/bin/bash\n")
    assert "#SBATCH --partition=gpu\n" in ended.stdout
    assert f" -m spmdkit train {config} run.simulate=2 2>" in ended.stdout
    assert not (tmp_path / "run").exists()


def test_the_number_of_the_job(scheduler, tmp_path, monkeypatch):
    """Of a cluster in a federation its name comes after; variables of another job stay here."""
    scheduler("sbatch", out="4711;cluster\n")
    monkeypatch.setenv("SPMDKIT_JOB_ADDRESSES", "elsewhere:1")
    assert submit(tmp_path / "slurm.sh") == "4711"
    assert "SPMDKIT_JOB_ADDRESSES" not in (tmp_path / "tools" / "env").read_text()


@pytest.mark.parametrize(
    "said",
    [
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        "sbatch: error: Munge encode failed: Failed to access /run/munge/munge.socket.2: No such file or directory",
    ],
)
def test_a_cluster_that_does_not_answer(said, scheduler, tmp_path):
    scheduler("sbatch", err=said, code=1)
    with pytest.raises(ClusterUnavailable, match="Slurm does not take the job now: ") as caught:
        submit(tmp_path / "slurm.sh")
    assert caught.value.exit_code == 75


@pytest.mark.parametrize(
    "said",
    [
        "sbatch: error: invalid partition specified: nope\n"
        "sbatch: error: Batch job submission failed: Invalid partition name specified",
        "sbatch: error: Batch job submission failed: Requested node configuration is not available",
        "",
    ],
)
def test_a_job_that_slurm_refuses(said, scheduler, tmp_path):
    scheduler("sbatch", err=said, code=1)
    with pytest.raises(ValueError, match="Slurm refuses the job: ") as caught:
        submit(tmp_path / "slurm.sh")
    assert "Nothing was submitted." in str(caught.value)
    assert (said.rpartition("failed: ")[2] or "sbatch ended with code 1") in str(caught.value)


def test_how_a_job_is(scheduler):
    scheduler("scontrol", out="JobId=7 JobName=run Requeue=1 Restarts=1 JobState=FAILED Reason=None ExitCode=3:0 X=1\n")
    assert ask("7") == State("FAILED", 3)
    scheduler("scontrol", err="slurm_load_jobs error: Unable to contact slurm controller", code=1)
    assert ask("7") is None


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (State("COMPLETED", 0), 0),
        (State("FAILED", 2), 2),
        (State("FAILED", 3), 3),
        (State("FAILED", 75), 75),
        (State("CANCELLED", 0), 75),
        (State("TIMEOUT", 0), 75),
        (State("NODE_FAIL", 0), 75),
        (State("FAILED", 0), 75),  # its script was killed by a signal
    ],
)
def test_the_exit_code_of_a_job(state, code):
    assert state.exit_code == code


def test_the_last_start_in_a_log(tmp_path):
    log = tmp_path / "slurm-7.log"
    assert last_start(log) == ["(there is none)"]
    log.write_text("--- one\na\n--- two\nb\nc\n")
    assert last_start(log) == ["--- two", "b", "c"]
    log.write_text("nothing yet\n")
    assert last_start(log) == ["nothing yet"]
