"""Devices that open, do not open, and hang; GPUs that are there and not used."""

import os
import sys

import pytest
from spmdkit.launch.diagnosis import devices as room
from spmdkit.launch.diagnosis.devices import devices, gpus
from spmdkit.mesh.joining.detection import Job

CUDA = {"jax-cuda13-plugin": "0.10.2"}


def environ(**variables: str) -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", **variables}


def test_simulated_devices_are_not_opened(monkeypatch):
    monkeypatch.setattr(room, "PROGRAM", "raise SystemExit('opened')")
    assert [finding.level for finding in devices({}, 8, None, {})] == ["ok"]


@pytest.mark.slow
def test_devices_of_a_child(monkeypatch):
    monkeypatch.setattr(room, "gpus_of_host", lambda: 0)
    (found,) = devices(environ(JAX_NUM_CPU_DEVICES="3", SPMDKIT_NUM_PROCESSES="2"), 0, None, {})
    assert (found.level, found.found) == ("ok", "cpu: 3 x cpu")


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("import sys; sys.exit('no driver')", "could not open its devices (exit code 1): no driver"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "could not open its devices (killed by signal 11)"),
        ("import time; time.sleep(60)", "JAX did not open its devices within 0 s"),
        ("print('nothing')", "could not open its devices (exit code 0)"),
    ],
)
def test_devices_that_do_not_open(program, found, monkeypatch):
    monkeypatch.setattr(room, "PROGRAM", program)
    opened = room._opened(environ(), seconds=60 if "sleep" not in program else 0.4)
    assert opened.level == "wrong"
    assert found in opened.found
    assert sys.executable


@pytest.mark.parametrize(
    ("variables", "of_host", "on_cpu", "processes", "versions", "level", "found", "fix"),
    [
        ({}, 8, False, None, CUDA, "ok", "8 on this host, 8 visible", ""),
        ({"CUDA_VISIBLE_DEVICES": ""}, 8, True, None, CUDA, "wrong", "8 on this host, 0 visible", "unset CUDA_VIS"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 0, True, None, CUDA, "note", "no NVIDIA driver is loaded", ""),
        ({}, 8, True, None, {}, "wrong", "but JAX computes on the CPU", "pip install --upgrade 'spmdkit[cuda]'"),
        ({"JAX_PLATFORMS": "cpu"}, 8, True, None, CUDA, "wrong", "computes on the CPU", "unset JAX_PLATFORMS=cpu"),
        ({}, 8, True, None, CUDA, "wrong", "but JAX computes on the CPU", "check the driver"),
        ({}, 4, False, 8, CUDA, "wrong", "4 visible, for 8 processes", "start at most 4 processes on each host"),
        ({}, 8, False, 3, CUDA, "wrong", "they do not divide among 3 processes", "start as many processes"),
        ({"CUDA_VISIBLE_DEVICES": "3"}, 8, False, 8, CUDA, "ok", "8 on this host, 1 visible", ""),
    ],
)
def test_gpus(variables, of_host, on_cpu, processes, versions, level, found, fix):
    job = Job("Slurm", None, 16, 3, 1, processes) if processes else None
    (finding,) = gpus(variables, of_host, on_cpu, job, versions)
    assert finding.level == level
    assert found in finding.found
    assert finding.fix.startswith(fix)


def test_the_gpus_of_a_process():
    job = Job("Slurm", None, 4, 1, 1, 4, (2, 3))
    assert gpus({}, 8, False, job, CUDA)[0].found == "8 on this host, 8 visible; this process's: 2, 3"
