"""`spmdkit launch` on this machine: what its workers are given, and what it says where one cannot start."""

import os
import sys

import pytest
from spmdkit.launch import local
from spmdkit.launch.launchers import LaunchRequest
from spmdkit.launch.local import LocalTarget, worker_environment
from spmdkit.launch.supervision.lifetime import bound_to
from support.runs import spmdkit, write_config


def test_environment_of_a_worker(monkeypatch):
    monkeypatch.setenv("KERAS_DISTRIBUTION_PROCESS_ID", "7")
    environment = worker_environment("127.0.0.1:1234", LocalTarget(2, 4), 1)
    assert {key: value for key, value in environment.items() if key.startswith(("SPMDKIT_", "KERAS_DIST"))} == {
        "SPMDKIT_JOB_ADDRESSES": "127.0.0.1:1234",
        "SPMDKIT_NUM_PROCESSES": "2",
        "SPMDKIT_PROCESS_ID": "1",
        "SPMDKIT_SIMULATE": "4",
        "SPMDKIT_BOUND": bound_to(os.getpid()),
        "SPMDKIT_RELAYED": "1",
    }


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.multiprocess
def test_mistake_found_by_a_worker_leaves_no_trace(tmp_path):
    config = write_config(tmp_path)
    ended = spmdkit("launch", config, "train.global_batch=10000", f"run.dir={tmp_path}/runs/new", "--on", "local:2x4")
    assert ended.returncode == 2
    *_, words, last = ended.stderr.splitlines()
    assert words.startswith("  error: train.global_batch=10000 rows, but")
    assert "failed first: exit code 2. Its last lines are above; rank" in last
    assert ended.stderr.count("train.global_batch=10000") == 1
    assert not (tmp_path / "runs").exists()


def test_restarts_are_not_fresh(tmp_path, monkeypatch):
    attempts = []
    monkeypatch.setattr(local, "run_attempts", lambda job, attempt: attempts.extend(map(attempt, (True, False))) or 0)
    local.launch(LaunchRequest(str(write_config(tmp_path)), fresh=True), LocalTarget(2, 4))
    assert ["--fresh" in attempt.starts[0].command for attempt in attempts] == [True, False]


def test_a_run_goes_on_where_it_is_now(tmp_path, cli):
    moved = tmp_path / "moved"
    moved.mkdir()
    write_config(tmp_path).rename(moved / "config.yaml")
    (moved / "metrics.jsonl").touch()
    printed = cli(0, "launch", moved, "--on", "local:2x4", "--dry-run").out
    assert f" train {moved / 'config.yaml'} 'run.dir=\"{moved}\"'\n" in printed


def test_dry_run_prints_commands_and_starts_nothing(tmp_path, cli):
    config = write_config(tmp_path)
    printed = cli(0, "launch", config, "train.steps=3", "--on", "local:2x4", "--dry-run").out
    variables = "SPMDKIT_JOB_ADDRESSES=127.0.0.1:PORT SPMDKIT_NUM_PROCESSES=2 SPMDKIT_PROCESS_ID={} SPMDKIT_SIMULATE=4"
    command = f"{sys.executable} -P -m spmdkit train {config} train.steps=3"
    assert printed.splitlines() == [f"{variables.format(rank)} {command}" for rank in range(2)]
    assert "2 processes with 3 devices each give 6" in cli(2, "launch", config, "--on", "local:2x3").err
    assert not (tmp_path / "run").exists()
