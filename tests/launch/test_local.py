"""`spmdkit launch` on this machine: what its workers are given, and what it says where one cannot start."""

import os
import sys
from pathlib import Path

import pytest
from spmdkit.launch.cli import main
from spmdkit.launch.local import LocalTarget, worker_environment
from support.runs import spmdkit

TINY = """
run: {simulate: 4, log_every: 1}
model: {name: mlp, features: 64, classes: 10, widths: [32]}
data: {source: synthetic}
strategy: {fsdp: {size: 2, floor_bytes: 1KiB}, data: 2}
train: {steps: 6, global_batch: 8}
eval: {every: 0, batches: 2}
checkpoint: {every: 0}
sample: {length: 0}
"""


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


def test_environment_of_a_worker(monkeypatch):
    monkeypatch.setenv("KERAS_DISTRIBUTION_PROCESS_ID", "7")
    environment = worker_environment("127.0.0.1:1234", LocalTarget(2, 4), 1)
    assert {key: value for key, value in environment.items() if key.startswith(("SPMDKIT_", "KERAS_DIST"))} == {
        "SPMDKIT_JOB_ADDRESSES": "127.0.0.1:1234",
        "SPMDKIT_NUM_PROCESSES": "2",
        "SPMDKIT_PROCESS_ID": "1",
        "SPMDKIT_SIMULATE": "4",
        "SPMDKIT_BOUND": str(os.getpid()),
        "SPMDKIT_RELAYED": "1",
    }


def test_invalid_config_starts_no_process(config, tmp_path, capsys):
    assert main(["launch", str(config), f"run.dir={tmp_path}/run", "--on", "local:2x3"]) == 2
    assert "2 processes with 3 devices each give 6: 4 != 6" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.multiprocess
def test_mistake_found_by_a_worker_leaves_no_trace(config, tmp_path):
    ended = spmdkit("launch", config, "train.global_batch=10000", f"run.dir={tmp_path}/runs/new", "--on", "local:2x2")
    assert ended.returncode == 2
    *_, words, last = ended.stderr.splitlines()
    assert words.startswith("  error: train.global_batch=10000 rows, but")
    assert "failed first: exit code 2. Its last lines are above; rank" in last
    assert ended.stderr.count("train.global_batch=10000") == 1
    assert not (tmp_path / "runs").exists()


def test_dry_run_prints_commands_and_starts_nothing(config, tmp_path, capsys):
    assert main(["launch", str(config), f"run.dir={tmp_path}/run", "--on", "local:2x2", "--dry-run"]) == 0
    variables = "SPMDKIT_JOB_ADDRESSES=127.0.0.1:PORT SPMDKIT_NUM_PROCESSES=2 SPMDKIT_PROCESS_ID={} SPMDKIT_SIMULATE=2"
    command = f"{sys.executable} -P -m spmdkit train {config} run.dir={tmp_path}/run"
    assert capsys.readouterr().out.splitlines() == [f"{variables.format(rank)} {command}" for rank in range(2)]
    assert not (tmp_path / "run").exists()
