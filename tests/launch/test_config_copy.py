"""The config that the processes of a launch read: the one that the launch has read, whatever happens to the file."""

import json
import stat
from pathlib import Path

import pytest
import yaml
from spmdkit.configs import load_config
from spmdkit.launch import local, mpi, ssh
from spmdkit.launch.launchers import LaunchJob, LaunchRequest
from spmdkit.launch.local import LocalTarget
from spmdkit.launch.remote.client import VARIABLE
from spmdkit.launch.supervision.attempts import write_copy
from support.runs import write_config

CHANGED = "tiny.yaml has changed since this launch began. The run keeps the config that it started with, "


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """A config that is edited after the job is loaded; gives the job, with its copy written."""
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path, run={"simulate": 4, "dir": "run"}, launch={"environment": {"MY_TOKEN": "abc"}})
    job = LaunchJob.load(LaunchRequest("tiny.yaml", ("train.steps=5",)), num_processes=2).with_copy()
    assert job.describe_change() == ""
    text = Path("tiny.yaml").read_text()
    Path("tiny.yaml").write_text(text.replace("0.01", "0.5"))
    write_copy(job)
    return job


def test_processes_read_the_config_that_the_launch_has_read(edited):
    _, path, *overrides = edited.command("python", fresh=False)[4:]
    assert path == edited.copy.path
    assert overrides == ['run.root="."', "train.steps=5"]
    found = load_config(path, overrides, num_processes=2)
    assert found.optimizer.learning_rate == 0.01
    assert found.train.steps == 5
    assert yaml.safe_load(Path(path).read_text())["train"]["steps"] == 5
    assert load_config("tiny.yaml", num_processes=2).optimizer.learning_rate == 0.5


def test_reports_an_edited_and_a_removed_file(edited):
    assert edited.describe_change().startswith(f"{CHANGED}{edited.copy.path}.")
    Path("tiny.yaml").unlink()
    assert edited.describe_change().startswith("tiny.yaml was removed since this launch began.")


def test_a_damaged_copy_is_written_again(edited):
    path = Path(edited.copy.path)
    before = path.read_text()
    path.write_text("edited")
    write_copy(edited)
    assert path.read_text() == before


def test_the_copy_contains_no_secrets(edited):
    path = Path(edited.copy.path)
    assert "abc" not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_another_config_has_another_copy(edited):
    job = LaunchJob.load(LaunchRequest("tiny.yaml"), num_processes=2).with_copy()
    assert job.copy.path != edited.copy.path
    assert Path(job.copy.path).parent == Path(edited.copy.path).parent


def test_relative_paths_start_from_the_directory_of_the_users_file(tmp_path, monkeypatch):
    """Also on a host where that directory has another path than here."""
    here = tmp_path / "here"
    there = tmp_path / "there"
    for directory in (here, there):
        directory.mkdir()
        monkeypatch.chdir(directory)
        write_config(directory / "configs", run={"simulate": 4, "dir": "run"})
    monkeypatch.chdir(here)
    job = LaunchJob.load(LaunchRequest("configs/tiny.yaml"), num_processes=2).with_copy()
    arguments = job.command("python", fresh=False)[5:]
    write_copy(job)
    copy = here / arguments[0]
    for directory in (here, there):
        monkeypatch.chdir(directory)
        assert load_config(copy, arguments[1:], num_processes=2).run.root == str(directory / "configs")


@pytest.mark.parametrize("source", ["quickstart", "run/config.yaml"])
def test_files_that_the_user_does_not_edit_are_not_watched(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = write_config(tmp_path, run={"simulate": 4, "dir": "run"})
    (tmp_path / "run").mkdir()
    config.rename(tmp_path / "run" / "config.yaml")
    job = LaunchJob.load(LaunchRequest(source, ("run.simulate=4",)), num_processes=2).with_copy()
    (tmp_path / "run" / "config.yaml").write_text("written by the run")
    assert job.describe_change() == ""


def test_every_launcher_of_this_machine_gives_the_copy(edited, monkeypatch):
    request = LaunchRequest("tiny.yaml")
    jobs = []
    commands = []

    def run_attempts(job, attempt):
        jobs.append(job)
        commands.extend(start.command for start in attempt(False).starts)
        return 0

    monkeypatch.setenv("MY_TOKEN", "abc")
    monkeypatch.setattr(mpi, "check_open_mpi", lambda: None)
    monkeypatch.setattr(ssh, "check_hosts", lambda hosts, job: 4000)
    Path("hosts.yaml").write_text("hosts: [one, two]\n")
    hosts = ssh.parse("hosts.yaml")
    tasks = []
    build_start = ssh.build_start

    def start_of_host(*arguments):
        start = build_start(*arguments)
        tasks.append(json.loads(start.environment[VARIABLE])["command"])
        return start

    monkeypatch.setattr(ssh, "build_start", start_of_host)
    sizes = LaunchRequest("tiny.yaml", ("launch.processes_per_node=2",))
    for launcher, words, target in ((local, request, LocalTarget(2, 4)), (ssh, request, hosts), (mpi, sizes, "")):
        monkeypatch.setattr(launcher, "run_attempts", run_attempts)
        assert launcher.launch(words, target) == 0
    for job, command in zip(jobs, [commands[0], tasks[0], commands[-1]], strict=True):
        assert job.copy is not None
        assert command[command.index("train") + 1] == job.copy.path
