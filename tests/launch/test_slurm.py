"""`--on slurm` without a cluster: the batch script and its submission."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from spmdkit.configs import load_config
from spmdkit.launch import slurm
from spmdkit.launch.launchers import LaunchJob, LaunchRequest, find_launcher
from spmdkit.launch.slurm import batch_script, submit
from spmdkit.launch.supervision.attempts import NotNow
from spmdkit.mesh.errors import UserError
from spmdkit.runtime import ownership
from support.runs import write_config

SIZES = {"nodes": 2, "processes_per_node": 2}


def test_parses_partitions():
    for partition in ("", "gpu-a100", "low,high"):
        assert find_launcher(f"slurm:{partition}") == (slurm, partition)


@pytest.mark.parametrize("text", ["slurm:a b", "slurm:--qos=x"])
def test_rejects_invalid_partitions(text):
    with pytest.raises(ValueError, match=r"is not valid; use slurm\[:PARTITION\]"):
        find_launcher(text)


@pytest.mark.parametrize("on", ["slurm", "mpi", "kubernetes"])
def test_rejects_a_size_in_place_of_a_target(on):
    with pytest.raises(ValueError, match=r"a size is not part of --on .* launch\.nodes=2 launch\.gpus_per_process=8$"):
        find_launcher(f"{on}:2x8")


@pytest.mark.parametrize("on", ["slurm", "kubernetes"])
def test_warns_if_a_job_for_real_devices_asks_for_no_gpu(on, tmp_path, cli):
    kubernetes = {"image": "registry.example.org/train:1", "volume_claim": "runs"}
    config = str(write_config(tmp_path, launch={"nodes": 2, "kubernetes": kubernetes}, strategy={"data": -1}))

    def warned(*words: str) -> bool:
        place = "run.dir=run"
        return "this job asks for no GPU" in cli(0, "launch", config, place, *words, "--on", on, "--dry-run").err

    assert warned("run.simulate=0")
    assert not warned("run.simulate=4")
    assert not warned("run.simulate=0", "launch.gpus_per_process=2")
    assert not warned("run.simulate=0", "launch.environment={JAX_PLATFORMS: cpu}")
    if on == "slurm":
        for option in ("--gres=gpu:8", "--gpus-per-node=8", "--exclusive"):
            assert not warned("run.simulate=0", f"launch.slurm.options=[{option}]")
        assert warned("run.simulate=0", "launch.slurm.options=[--constraint=h100]")


def test_nothing_is_written_before_submission(tmp_path, cli, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    config = str(write_config(tmp_path, launch=SIZES))
    printed = cli(0, "launch", config, "run.simulate=2", "--on", "slurm:gpu", "--dry-run")
    assert printed.err == ""
    assert printed.out.startswith("#!/bin/bash\n")
    assert "#SBATCH --partition=gpu\n" in printed.out
    assert re.search(r" -m spmdkit train \S+/run/logs/config-\w+\.yaml run\.simulate=2 2>", printed.out)
    for words, message in (
        (["run.simulate=2"], "sbatch is not on PATH"),
        ([], "4 processes with 8 devices each give 32"),
        (["run.simulate=0", "launch.gpus_per_process=1"], "processes_per_node=2 x launch.gpus_per_process=1 gives 4"),
    ):
        assert message in cli(2, "launch", config, *words, "--on", "slurm").err
    assert not (tmp_path / "run").exists()


def test_returns_the_number_of_the_job(put_command, tmp_path, monkeypatch):
    put_command("sbatch", out="4711;cluster\n")
    monkeypatch.setenv("SPMDKIT_JOB_ADDRESSES", "elsewhere:1")
    assert submit(tmp_path / "slurm.sh") == "4711"
    assert "SPMDKIT_JOB_ADDRESSES" not in (tmp_path / "tools" / "env").read_text()


def test_submits_nothing_for_a_directory_in_use(put_command, tmp_path, cli):
    put_command("sbatch", out="4711")
    config, run = write_config(tmp_path, launch=SIZES), tmp_path / "run"
    run.mkdir()
    parent = ownership.this_process()._replace(pid=os.getppid(), started=ownership.start_of(os.getppid()))
    (run / ownership.NAME).write_text(json.dumps(parent._asdict()))
    assert f"{run} is in use by" in cli(2, "launch", config, "run.simulate=2", "--on", "slurm").err
    assert os.listdir(run) == [ownership.NAME]


FAILED = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    ("said", "error", "message", "code"),
    [
        (f"{FAILED}Unable to contact slurm controller (connect failure)", NotNow, "cannot take the job now: ", 75),
        (f"{FAILED}Socket timed out on send/recv operation", NotNow, "cannot take the job now: ", 75),
        (f"sbatch: error: x\n{FAILED}Invalid partition name", UserError, "job: x; .*: Invalid partition.*Nothing", 2),
        ("", UserError, "Slurm refuses the job: sbatch ended with code 1. .* Nothing was submitted", 2),
    ],
)
def test_failed_submissions(said, error, message, code, put_command, tmp_path):
    put_command("sbatch", err=said, code=1)
    with pytest.raises(error, match=message) as caught:
        submit(tmp_path / "slurm.sh")
    assert caught.value.exit_code == code


NASTY = 'it\'s a "run" #1 of $HOME `id` 50% & more; (x)'

OPTIONS = (
    "launch.nodes=2",
    "launch.processes_per_node=4",
    "launch.gpus_per_process=1",
    "launch.cpus_per_process=8",
    "launch.time='12:00:00'",
    "launch.slurm.account=lab",
    "launch.slurm.qos=long",
    "launch.slurm.warn_seconds=300",
    "launch.slurm.options=['--constraint=h100', '--exclusive']",
    "launch.slurm.srun_options=['--container-image=image.sqsh']",
    "launch.prefix=[apptainer, exec, --nv, image.sif]",
    "launch.python=/opt/python",
    "launch.setup=['module load cuda']",
    "launch.environment={NCCL_DEBUG: INFO}",
)


def script(*overrides: str, folder: str = "/shared/run", partition: str = "", **options) -> str:
    words = (f"run.dir={json.dumps(folder)}", *overrides)
    return batch_script(LaunchJob.load(LaunchRequest("quickstart", words, **options)), partition)


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def check_syntax(text: str) -> None:
    ended = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def ran(text: str, tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a script as Slurm would, with an srun that prints its arguments as Python sees them, and a scontrol."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "srun").write_text(
        "#!/usr/bin/env python3\nimport os, sys\nprint(sys.argv[1:])\n"
        "sys.stderr.write(os.environ.get('SAYS', ''))\nsys.exit(int(os.environ.get('CODE', '0')))\n"
    )
    (tools / "scontrol").write_text('#!/bin/sh\necho "scontrol $*"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    return subprocess.run(["bash"], input=text, env=environment | variables, capture_output=True, text=True)


def test_script_contains_all_options():
    text = script("strategy={data: 8}", "run.simulate=0", *OPTIONS, partition="gpu")
    assert directives(text) == [
        "--job-name=run",
        "--nodes=2",
        "--ntasks=8",
        "--ntasks-per-node=4",
        "--cpus-per-task=8",
        "--gpus-per-task=1",
        "--time=12:00:00",
        "--partition=gpu",
        "--account=lab",
        "--qos=long",
        "--signal=USR1@300",
        "--requeue",
        "--open-mode=append",
        f"--chdir={Path.cwd()}",
        "--output=/shared/run/logs/slurm-%j.log",
        "--constraint=h100",
        "--exclusive",
    ]
    assert "export NCCL_DEBUG=INFO\nmodule load cuda\n" in text
    assert "srun --kill-on-bad-exit=1 --wait=120 --mpi=none --open-mode=append --cpus-per-task=8 --container" in text
    copy = re.search(r"^config=(/shared/run/logs/config-\w+\.yaml)$", text, re.MULTILINE)
    assert copy is not None
    assert f" apptainer exec --nv image.sif /opt/python -P -m spmdkit train {copy[1]} 'run.root=\".\"' " in text
    check_syntax(text)


def test_script_omits_missing_options():
    text = script("launch.slurm.warn_seconds=0", "launch.slurm.requeue=false")
    asked = " ".join(directives(text))
    assert all(word not in asked for word in ("gpus", "cpus", "time", "partition", "account", "qos", "signal"))
    assert "--no-requeue" in asked
    assert "scontrol" not in text
    check_syntax(text)


@pytest.mark.parametrize("requeue", ["true", "false"])
@pytest.mark.parametrize("fresh", [True, False])
def test_special_characters_are_quoted(requeue, fresh, tmp_path):
    folder = tmp_path / NASTY
    words = ("sample.prompt='a b $x'", f"launch.slurm.requeue={requeue}", f'launch.environment={{A: "{NASTY[:4]} $B"}}')
    text = script(*words, folder=str(folder), fresh=fresh)
    check_syntax(text)
    ended = ran(text, tmp_path)
    assert ended.returncode == 0, ended.stderr
    given = eval(ended.stdout.splitlines()[1])
    assert f"--output={folder}/logs/rank-%t.log".replace("50%", "50%%") in given
    at = given.index("train")
    assert Path(given[at + 1]).parent == folder / "logs"
    assert given[at + 2 : at + 6] == ['run.root="."', f"run.dir={json.dumps(str(folder))}", *words[:2]]
    assert load_config(given[at + 1]).sample.prompt == "a b $x"
    assert given[-1] == ("--fresh" if fresh else words[-1])
    assert (folder / "logs").is_dir()
    asked = next(line for line in directives(text) if "--output" in line)
    assert asked.startswith('"--output=')
    assert '\\"run\\" \\#1' in asked


OTHERS_STOPPED = """srun: error: n2: {}: {}
srun: launch/slurm: _step_signal: Terminating StepId=1.0
slurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***
srun: error: n1: task 0: Terminated
srun: Force Terminated StepId=1.0
"""


@pytest.mark.parametrize(
    ("ending", "code", "again"),
    [
        ("Exited with exit code 2", 2, False),
        ("Exited with exit code 1", 1, False),
        ("Exited with exit code 75", 75, True),
        ("Exited with exit code 134", 75, True),
        ("Killed", 75, True),
        ("Segmentation fault (core dumped)", 75, True),
    ],
)
@pytest.mark.parametrize("tasks", ["task 1", "tasks 1-3,5"])
def test_exit_code_is_that_of_the_first_failure(ending, code, again, tasks, tmp_path):
    text = script(folder=str(tmp_path / "run"))
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank-1.log").write_text("its last words\n")
    ended = ran(text, tmp_path, SAYS=OTHERS_STOPPED.format(tasks, ending), CODE="143")
    assert ended.returncode == code
    assert ("scontrol requeue 7" in ended.stdout) == again
    assert f"rank 1 ended first: {ending}. Its last lines, all of them in {logs}/rank-1.log:" in ended.stdout
    assert "its last words" in ended.stdout


@pytest.mark.parametrize(("code", "expected"), [("0", 0), ("1", 1), ("137", 75)])
def test_exit_code_without_a_named_process(code, expected, tmp_path):
    assert ran(script(folder=str(tmp_path / "run")), tmp_path, CODE=code).returncode == expected


@pytest.mark.parametrize(("given", "expected"), [({}, 5), ({"restarts": 2}, 2)])
def test_the_command_may_limit_restarts(given, expected):
    assert f"not restarted: {expected} restarts made" in script("launch.slurm.restarts=5", **given)


@pytest.mark.slow
def test_requeues_while_there_are_newer_checkpoints(tmp_path):
    text = script("launch.slurm.restarts=5", folder=str(tmp_path / "run"), restarts=1)
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "10.orbax-checkpoint-tmp").mkdir(parents=True)
    for step in (0, 4, 9, 10):
        if step:
            (checkpoints / str(step)).mkdir()
        ended = ran(text, tmp_path, CODE="137")
        assert ended.returncode == 75
        assert f"requeueing the job, to resume from step {step}\nscontrol requeue 7\n" in ended.stdout
    ended = ran(text, tmp_path, CODE="137")
    assert ended.returncode == 1
    assert "not restarted: 1 restarts made no newer checkpoint than step 10" in ended.stdout
    assert "scontrol" not in ended.stdout


@pytest.mark.slow
def test_fresh_applies_until_the_new_run_has_a_config(tmp_path):
    text = script(folder=str(tmp_path / "run"), fresh=True)
    config = tmp_path / "run" / "config.yaml"
    config.parent.mkdir()
    config.write_text("the old run")
    os.utime(config, (1, 1))
    assert "'--fresh']" in ran(text, tmp_path).stdout
    assert "'--fresh']" in ran(text, tmp_path, SLURM_RESTART_COUNT="1").stdout
    config.write_text("the new run")
    assert "'--fresh']" not in ran(text, tmp_path, SLURM_RESTART_COUNT="2").stdout
    assert "'--fresh']" in ran(text, tmp_path, SLURM_JOB_ID="8").stdout, "another job of this script"


def test_every_start_of_a_job_reads_the_config_that_was_submitted(tmp_path):
    config = write_config(tmp_path, launch={"environment": {"NOTE": "#SBATCH --nodes=7"}})
    text = batch_script(LaunchJob.load(LaunchRequest(str(config), ("run.simulate=8",))), "")
    check_syntax(text)
    first = ran(text, tmp_path)
    config.write_text(config.read_text().replace("0.01", "0.5"))
    (copy,) = (tmp_path / "run" / "logs").glob("config-*.yaml")
    copy.write_text("damaged")
    second = ran(text, tmp_path, SLURM_RESTART_COUNT="1")
    for ended in (first, second):
        assert ended.returncode == 0, ended.stderr
        assert f"'train', '{copy}', 'run.simulate=8'" in ended.stdout
    assert load_config(copy, ["run.simulate=8"]).optimizer.learning_rate == 0.01
    line = f"{config} has changed since this launch began. The run keeps the config that it started with, {copy}."
    assert line not in first.stdout
    assert second.stdout.count(line) == 1


def test_a_config_that_is_gone_does_not_end_a_requeued_job(tmp_path):
    config = write_config(tmp_path)
    text = batch_script(LaunchJob.load(LaunchRequest(str(config))), "")
    config.unlink()
    ended = ran(text, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
