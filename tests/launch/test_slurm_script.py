"""The batch script that a config gives: what it asks Slurm for, and that bash reads its words as they were meant."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from spmdkit.configs import load_config
from spmdkit.launch.places import Run
from spmdkit.launch.slurm_script import batch_script, directive

NASTY = 'it\'s a "run" #1 of $HOME `id` 50% & more; (x)'

SIZES = (
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
    run = Run("quickstart", words, **options)
    return batch_script(run, load_config("quickstart", words, num_processes=None), partition)


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


def test_what_it_asks_for():
    text = script("strategy={data: 8}", "run.simulate=0", *SIZES, partition="gpu")
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
    assert (
        "srun --kill-on-bad-exit=1 --wait=120 --mpi=none --open-mode=append --cpus-per-task=8 --container-image="
        in text
    )
    assert (
        "    apptainer exec --nv image.sif /opt/python -P -m spmdkit train quickstart 'run.dir=\"/shared/run\"'" in text
    )
    check_syntax(text)


def test_what_is_not_given_is_not_asked_for():
    text = script("launch.slurm.warn_seconds=0", "launch.slurm.requeue=false")
    asked = " ".join(directives(text))
    assert all(word not in asked for word in ("gpus", "cpus", "time", "partition", "account", "qos", "signal"))
    assert "--no-requeue" in asked
    assert "scontrol" not in text
    check_syntax(text)


@pytest.mark.parametrize("requeue", ["true", "false"])
@pytest.mark.parametrize("fresh", [True, False])
def test_nasty_words_come_through(requeue, fresh, tmp_path):
    """Paths, overrides, variables: srun gets each as it was typed."""
    folder = tmp_path / NASTY
    words = ("sample.prompt='a b $x'", f"launch.slurm.requeue={requeue}", f'launch.environment={{A: "{NASTY[:4]} $B"}}')
    text = script(*words, folder=str(folder), fresh=fresh)
    check_syntax(text)
    ended = ran(text, tmp_path)
    assert ended.returncode == 0, ended.stderr
    given = eval(ended.stdout.splitlines()[1])
    assert f"--output={folder}/logs/rank-%t.log".replace("50%", "50%%") in given
    at = given.index("train")
    assert given[at : at + 5] == ["train", "quickstart", f"run.dir={json.dumps(str(folder))}", *words[:2]]
    assert given[-1] == ("--fresh" if fresh else words[-1])
    assert (folder / "logs").is_dir()
    asked = next(line for line in directives(text) if "--output" in line)
    assert asked.startswith('"--output=')
    assert '\\"run\\" \\#1' in asked


def test_a_directive_cannot_end_its_line():
    assert directive("--nodes=2") == "--nodes=2"
    assert directive('--comment=a "b" \\ #c') == '"--comment=a \\"b\\" \\\\ \\#c"'
    with pytest.raises(ValueError, match="has a control character, and cannot stand in a script of Slurm"):
        directive("--comment=a\n#SBATCH --nodes=100")


def test_a_backslash_in_a_path_is_refused():
    with pytest.raises(ValueError, match="holds a backslash, which Slurm's file names may not"):
        script(folder="/shared/a\\b")


def test_bash_reads_no_more_than_was_meant(tmp_path):
    text = script(f"run.root={tmp_path}/$(touch {tmp_path}/here)", folder=str(tmp_path / "$(touch there)"))
    assert ran(text, tmp_path).returncode == 0
    assert not (tmp_path / "here").exists()
    assert not Path("there").exists()


OTHERS_STOPPED = """srun: error: n2: task 1: {}
srun: launch/slurm: _step_signal: Terminating StepId=1.0
slurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***
srun: error: n1: task 0: Terminated
srun: Force Terminated StepId=1.0
"""


@pytest.mark.parametrize(
    ("ending", "code", "again"),
    [
        ("Exited with exit code 2", 2, False),
        ("Exited with exit code 3", 3, False),
        ("Exited with exit code 1", 1, False),
        ("Exited with exit code 75", 75, True),
        ("Exited with exit code 134", 75, True),
        ("Killed", 75, True),
        ("Segmentation fault (core dumped)", 75, True),
    ],
)
def test_the_first_process_that_failed_decides(ending, code, again, tmp_path):
    """The code of srun itself is that of the processes it ended: 143."""
    text = script(folder=str(tmp_path / "run"))
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank-1.log").write_text("its last words\n")
    ended = ran(text, tmp_path, SAYS=OTHERS_STOPPED.format(ending), CODE="143")
    assert ended.returncode == code
    assert ("scontrol requeue 7" in ended.stdout) == again
    assert f"rank 1 ended first: {ending}. Its last lines, all of them in {logs}/rank-1.log:" in ended.stdout
    assert "its last words" in ended.stdout


@pytest.mark.parametrize(("code", "expected"), [("0", 0), ("1", 1), ("137", 75)])
def test_srun_that_names_no_process(code, expected, tmp_path):
    assert ran(script(folder=str(tmp_path / "run")), tmp_path, CODE=code).returncode == expected


def test_a_group_of_processes_that_failed_together(tmp_path):
    said = "srun: error: n[1-2]: tasks 0-3,5: Exited with exit code 75\n"
    ended = ran(script(folder=str(tmp_path / "run")), tmp_path, SAYS=said, CODE="75")
    assert "rank 0 ended first: Exited with exit code 75" in ended.stdout
    assert ended.returncode == 75


def test_it_goes_back_while_there_are_newer_checkpoints(tmp_path):
    """One restart may be in vain; a newer step begins the count anew."""
    text = script("launch.slurm.restarts=1", folder=str(tmp_path / "run"))
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "10.orbax-checkpoint-tmp").mkdir(parents=True)
    for step in (0, 4, 9, 10):
        if step:
            (checkpoints / str(step)).mkdir()
        ended = ran(text, tmp_path, CODE="137")
        assert ended.returncode == 75
        assert f"back into the queue, to go on from step {step}\nscontrol requeue 7\n" in ended.stdout
    ended = ran(text, tmp_path, CODE="137")
    assert ended.returncode == 1
    assert "not started again: 1 restarts made no newer checkpoint than step 10" in ended.stdout
    assert "scontrol" not in ended.stdout


def test_restarts_of_the_command_line_win(tmp_path):
    assert "-gt 5 ]" in script(folder=str(tmp_path / "run"), restarts=5)
    assert "-gt 3 ]" in script(folder=str(tmp_path / "run"))


def test_fresh_ends_with_the_config_of_the_new_run(tmp_path):
    """A restart goes on with the new run; one that comes before the new run has begun still starts anew."""
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
