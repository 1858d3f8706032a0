"""Joining and leaving a run of several real processes, started by the launcher."""

import os
import subprocess
import sys
import time

import jax
import pytest
from spmdkit.launch.startup import worker
from spmdkit.launch.startup.detection import find_job
from spmdkit.launch.startup.worker import Timeouts, count_processes, count_simulated, job_environment, joins_processes
from spmdkit.launch.supervision.workers import Start, free_port, run_processes

JOB = {"address": "127.0.0.1:1", "num_processes": 2, "process_id": 1, "simulate": 4}

PROGRAM = """
import os, sys, time
from spmdkit.configs.schema import Timeouts
from spmdkit.launch.startup.worker import joins_processes
rank = int(os.environ["SPMDKIT_PROCESS_ID"])
with joins_processes(Timeouts(rendezvous=60, shutdown=600)):
    import jax
    from jax.experimental import multihost_utils
    print("joined", jax.process_count())
    exec(sys.argv[1])
"""


def run(body: str, tmp_path):
    address = f"127.0.0.1:{free_port()}"
    environments = [{**os.environ, "JAX_PLATFORMS": "cpu", **job_environment(address, 2, rank)} for rank in range(2)]
    command = [sys.executable, "-u", "-c", PROGRAM, body]
    return run_processes([Start(command, each) for each in environments], tmp_path)


def test_round_trips_the_job_through_the_environment(monkeypatch):
    assert (count_processes(), count_simulated()) == (1, None)
    for name, value in job_environment(**JOB, identity="try 2", local_rank=1, local_processes=2).items():
        monkeypatch.setenv(name, value)
    assert (count_processes(), count_simulated()) == (2, 4)
    found = find_job()
    assert found is not None
    assert (found.identity, found.local_rank, found.local_processes) == ("try 2", 1, 2)
    monkeypatch.setenv("SPMDKIT_SIMULATE", "0")
    with pytest.raises(ValueError, match="SPMDKIT_SIMULATE must be an integer of at least 1, got '0'"):
        count_simulated()


def test_passes_errors_in_a_run_of_one():
    with pytest.raises(KeyError, match="mine"), joins_processes(Timeouts()):
        raise KeyError("mine")


def test_joins_and_leaves_a_run_of_several(monkeypatch):
    calls = []
    monkeypatch.setattr(worker, "count_processes", lambda: 2)
    monkeypatch.setattr(worker, "initialize", lambda **options: calls.append(options))
    monkeypatch.setattr(jax.config, "update", lambda *setting: calls.append(setting))
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: calls.append("left"))
    with joins_processes(Timeouts(rendezvous=1, heartbeat=20, shutdown=3), "runs/mine"):
        calls.append("joined")
    seconds = {"initialization_timeout": 1, "heartbeat_timeout_seconds": 20, "shutdown_timeout_seconds": 3}
    setting = ("jax_enable_preemption_service", False)
    assert calls == [setting, {**seconds, "run": "runs/mine"}, "joined", "left"]


def test_what_was_printed_before_an_error_is_not_lost():
    """The process ends without the cleanup that would write the buffers of a pipe."""
    program = """
from spmdkit.launch.startup import worker
from spmdkit.mesh.errors import UserError
worker.count_processes = lambda: 2
worker.initialize = lambda **options: print("step 41")
with worker.joins_processes(worker.Timeouts()):
    raise UserError("no room")
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "step 41\n"), ended.stderr
    assert "error: no room" in ended.stderr


@pytest.mark.multiprocess
def test_an_error_ends_the_run_at_once(tmp_path):
    body = "if rank == 1: raise RuntimeError('boom')\nmultihost_utils.sync_global_devices('a')"
    start = time.monotonic()
    outcome = run(body, tmp_path)
    assert outcome.cause is not None
    assert (outcome.cause.rank, outcome.exit_code) == (1, 1)
    assert "RuntimeError: boom" in outcome.tails[1]
    assert "Please report it" in outcome.tails[1][-1]
    assert time.monotonic() - start < 300, "it does not wait for timeouts.shutdown"


@pytest.mark.parametrize(
    ("step", "save", "seconds"),
    [(1800, 0, 1800), (1800, 5000, 5000), (6, 60, 1200), (0, 0, 604800), (10**12, 0, 604800)],
)
def test_derives_the_timeout_of_writing(step, save, seconds):
    assert Timeouts(step=step, save=save).writing == seconds
