"""How a process joins a run of several and leaves it; real processes, joined by JAX, started by the launcher."""

import os
import sys
import time

import pytest
from spmdkit.launch.supervision.ports import free_port
from spmdkit.launch.supervision.processes import run_processes
from spmdkit.launch.supervision.workers import Start
from spmdkit.mesh.joining.detection import find_job
from spmdkit.training.worker import (
    Job,
    Timeouts,
    job_environment,
    multi_process,
    one_of_several,
    processes_in_job,
    simulated_by_job,
)

JOB = Job("127.0.0.1:1", num_processes=2, process_id=1, simulate=4)

PROGRAM = """
import os, sys, time
from spmdkit.training.worker import Timeouts, multi_process
rank = int(os.environ["SPMDKIT_PROCESS_ID"])
with multi_process(Timeouts(rendezvous=60, shutdown=20)):
    import jax
    from jax.experimental import multihost_utils
    print("joined", jax.process_count())
    exec(sys.argv[1])
"""


def run(body: str, tmp_path, num_processes: int = 2):
    address = f"127.0.0.1:{free_port()}"
    environments = [
        {**os.environ, "JAX_PLATFORMS": "cpu", **job_environment(Job(address, num_processes, rank, None))}
        for rank in range(num_processes)
    ]
    command = [sys.executable, "-u", "-c", PROGRAM, body]
    return run_processes([Start(command, each) for each in environments], tmp_path)


def test_environment(monkeypatch):
    assert (processes_in_job(), simulated_by_job()) == (1, None)
    for name, value in job_environment(JOB).items():
        monkeypatch.setenv(name, value)
    assert (processes_in_job(), simulated_by_job()) == (2, 4)


def test_environment_must_be_numbers(monkeypatch):
    monkeypatch.setenv("SPMDKIT_SIMULATE", "four")
    with pytest.raises(ValueError, match="SPMDKIT_SIMULATE='four' must be a whole number of at least 1"):
        simulated_by_job()


def test_devices_need_not_be_simulated():
    assert "SPMDKIT_SIMULATE" not in job_environment(JOB._replace(simulate=None))


def test_a_launcher_may_say_more(monkeypatch):
    for name, value in job_environment(JOB._replace(identity="try 2", local_rank=1, local_processes=2)).items():
        monkeypatch.setenv(name, value)
    found = find_job()
    assert found is not None
    assert (found.identity, found.local_rank, found.local_processes) == ("try 2", 1, 2)


def test_half_of_what_a_process_has_to_know(monkeypatch):
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    assert one_of_several()
    with pytest.raises(ValueError, match="JAX_PROCESS_ID says that this is process 1, but nothing says how many"):
        processes_in_job()


def test_a_run_of_one_lets_errors_through():
    with pytest.raises(KeyError, match="mine"), multi_process(Timeouts()):
        raise KeyError("mine")


def test_timeouts_are_checked():
    with pytest.raises(ValueError, match=r"timeouts\.rendezvous=0 .*\ntimeouts\.shutdown=-1 must be at least 1 second"):
        Timeouts(rendezvous=0, shutdown=-1)


@pytest.mark.multiprocess
def test_all_finish_together(tmp_path):
    outcome = run("time.sleep(rank)", tmp_path, num_processes=3)
    assert {end.code for end in outcome.exits} == {0}
    assert all("joined 3\n" in (tmp_path / f"rank-{rank}.log").read_text() for rank in range(3))


@pytest.mark.multiprocess
def test_an_error_ends_the_run_at_once_and_is_named(tmp_path):
    body = "if rank == 1: raise RuntimeError('boom')\nmultihost_utils.sync_global_devices('a')"
    start = time.monotonic()
    outcome = run(body, tmp_path)
    assert outcome.cause is not None
    assert (outcome.cause.rank, outcome.exit_code) == (1, 1)
    assert "RuntimeError: boom" in outcome.tails[1]
    assert "Please report it" in outcome.tails[1][-1]
    assert time.monotonic() - start < 30


@pytest.mark.multiprocess
def test_a_mistake_is_one_message(tmp_path):
    body = "from spmdkit.mesh.simulate import simulate\nif rank == 0: simulate(0)\ntime.sleep(60)"
    outcome = run(body, tmp_path)
    assert outcome.exit_code == 2
    assert outcome.tails[0][-1] == "error: simulate(0): the number of simulated devices must be at least 1."
    assert not any("Traceback" in line for line in outcome.tails[0])


@pytest.mark.multiprocess
def test_sigterm_ends_a_joined_process(tmp_path):
    outcome = run("if rank == 1: os.kill(os.getpid(), 15)\ntime.sleep(60)", tmp_path)
    assert outcome.cause is not None
    assert (outcome.cause.rank, outcome.cause.how) == (1, "killed by SIGTERM")


@pytest.mark.parametrize(
    ("step", "save", "seconds"), [(1800, 0, 1800), (1800, 5000, 5000), (6, 60, 1200), (0, 0, 604800)]
)
def test_writing_may_take_as_long_as_training_waits_for_it(step, save, seconds):
    assert Timeouts(step=step, save=save).writing == seconds
