"""Checks of the host."""

import json
import os
import socket
import sys

import pytest
from spmdkit.launch.doctor import host_checks
from spmdkit.launch.doctor.findings import format_finding, format_text
from spmdkit.launch.doctor.job_checks import GIB, Finding
from spmdkit.launch.startup.variables import Job


@pytest.mark.parametrize(
    ("found", "level"),
    [
        (host_checks.check_cores(8, 2), "note"),
        (host_checks.check_cores(8, 8), "ok"),
        (host_checks.check_cores(2, 1.5), "note"),
        (host_checks.check_memory(8 * GIB), "ok"),
        (host_checks.check_memory(GIB // 2), "wrong"),
        (host_checks.check_memory(None), "ok"),
        (host_checks.check_open_files(65536), "ok"),
        (host_checks.check_open_files(-1), "ok"),
        (host_checks.check_open_files(256), "wrong"),
        (host_checks.check_host_name("n1", "10.0.0.1"), "ok"),
        (host_checks.check_host_name("n1", "127.0.1.1"), "ok"),
        (host_checks.check_host_name("n1", ""), "wrong"),
    ],
    ids=str,
)
def test_reports_too_little_of_a_resource(found, level):
    assert found.level == level
    assert bool(found.fix) == (level != "ok")


def test_cgroups_limit_cores_and_memory(tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    monkeypatch.setattr(host_checks, "CGROUP", tmp_path)
    assert host_checks._count_cores() == 0.5
    assert host_checks._free_memory() == 2000
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert host_checks._count_cores() >= 1


def test_rejects_small_shared_memory(tmp_path, monkeypatch):
    assert host_checks.check_shared_memory(tmp_path) == host_checks.check_shared_memory(tmp_path / "missing") == []
    monkeypatch.setattr(host_checks, "MIN_SHARED_MEMORY", 2**62)
    (found,) = host_checks.check_shared_memory(tmp_path)
    assert (found.level, found.fix) == ("wrong", "start the container with --shm-size=8g, or --ipc=host")


@pytest.mark.slow_cases("0")
@pytest.mark.parametrize("simulated", [0, 2])
def test_notes_the_known_faults_of_jaxlib_on_its_devices(simulated, monkeypatch):
    monkeypatch.setattr(host_checks, "count_gpus", lambda: 0)
    found = host_checks.check_devices(environ(), simulated, None, {"jaxlib": "0.10.2"})
    (fault,) = (each for each in found if each.name == "known faults")
    assert fault.level == "note"
    assert fault.found.startswith("jaxlib 0.10.2 on cpu: jitted `vmap")
    assert "github.com/jax-ml/jax/issues/" in fault.found
    assert fault.fix == "install jaxlib 0.10.1, 0.11.0 or newer"
    newer = host_checks.check_devices(environ(), simulated, None, {"jaxlib": "0.12.0.1"})
    assert "known faults" not in {each.name for each in newer}


CUDA = {"jax-cuda13-plugin": "0.10.2"}


def environ(**variables: str) -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", **variables}


def test_does_not_open_simulated_devices(monkeypatch):
    monkeypatch.setattr(host_checks, "open_devices", pytest.fail)
    assert [finding.level for finding in host_checks.check_devices({}, 8, None, {})] == ["ok"]


@pytest.mark.slow
def test_opens_devices_in_a_child(monkeypatch):
    monkeypatch.setattr(host_checks, "count_gpus", lambda: 0)
    variables = environ(JAX_NUM_CPU_DEVICES="3", SPMDKIT_NUM_PROCESSES="2")
    opened, computed = host_checks.check_devices(variables, 0, None, {})
    assert (opened.level, opened.found) == ("ok", "cpu: 3 x cpu")
    assert computed == Finding("arithmetic", "known products and a known sum are right on cpu:0, cpu:1, cpu:2")
    job = Job("Slurm", None, 4, 1, 1, 4, (2, 1))
    assert host_checks.check_devices(variables, 0, job, {})[1].found.endswith("are right on cpu:2, cpu:1")


def test_names_the_device_that_computes_wrong_numbers():
    problems = {
        "gpu:0": [],
        "gpu:3": ["a sum of 4 numbers in float32: 5 instead of 6"],
        "gpu:4": ["RuntimeError: lost"],
    }
    found = host_checks.check_arithmetic(problems, "n7")
    assert [(each.name, each.level) for each in found] == [("arithmetic", "wrong")] * 2
    assert found[0].found == "gpu:3 of n7: a sum of 4 numbers in float32: 5 instead of 6"
    assert found[1].found == "gpu:4 of n7: RuntimeError: lost"
    assert found[0].fix.startswith("leave the device out (CUDA_VISIBLE_DEVICES, or another host)")
    right = host_checks.check_arithmetic({"gpu:0": [], "gpu:1": []}, "n6")
    assert "\n".join(format_text([right, found]).splitlines()[2:]) == "\n".join(
        [
            *format_finding(right[0], "rank 0"),
            *format_finding(found[0], "rank 1"),
            *format_finding(found[1], "rank 1"),
            "",
            "2 problems found.",
        ]
    )


def test_a_wrong_device_fails_the_command(monkeypatch, cli):
    wrong = {
        "platform": "gpu",
        "kind": "H100",
        "count": 2,
        "problems": {"gpu:0": [], "gpu:1": ["a sum: 5 instead of 6"]},
    }
    program = (sys.executable, "-c", f"print({json.dumps(json.dumps(wrong))})")
    monkeypatch.setattr(host_checks.open_devices, "__kwdefaults__", {"seconds": 60, "program": program})
    printed = cli(2, "doctor").out
    assert "  ok    devices       gpu: 2 x H100\n" in printed
    assert f"  WRONG arithmetic    gpu:1 of {socket.gethostname()}: a sum: 5 instead of 6\n" in printed


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("import sys; sys.exit('no driver')", "could not open its devices (exit code 1): no driver"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "could not open its devices (killed by signal 11)"),
        ("import time; time.sleep(60)", "JAX did not open its devices and compute on them within 0 s"),
    ],
)
def test_reports_devices_that_do_not_open(program, found):
    seconds = 0.4 if "sleep" in program else 60
    (opened,) = host_checks.open_devices(environ(), seconds=seconds, program=(sys.executable, "-c", program))
    assert opened.level == "wrong"
    assert found in opened.found


@pytest.mark.parametrize(
    ("variables", "of_host", "on_cpu", "processes", "versions", "level", "found", "fix"),
    [
        ({}, 8, False, None, CUDA, "ok", "8 on this host, 8 visible", ""),
        ({"CUDA_VISIBLE_DEVICES": ""}, 8, True, None, CUDA, "wrong", "8 on this host, 0 visible", "unset CUDA_VIS"),
        ({}, 8, True, None, {}, "wrong", "but JAX computes on the CPU", "pip install --upgrade 'spmdkit[cuda]'"),
        ({"JAX_PLATFORMS": "cpu"}, 8, True, None, CUDA, "wrong", "computes on the CPU", "unset JAX_PLATFORMS=cpu"),
        ({}, 8, True, None, CUDA, "wrong", "but JAX computes on the CPU", "check the driver"),
        ({}, 4, False, 8, CUDA, "wrong", "4 visible, for 8 processes", "start a number of processes on each host"),
        ({}, 8, False, 3, CUDA, "wrong", "8 visible, for 3 processes", "start a number of processes on each host"),
        ({}, 8, False, 4, CUDA, "ok", "8 on this host, 8 visible", ""),
        ({"CUDA_VISIBLE_DEVICES": "3"}, 8, False, 8, CUDA, "ok", "8 on this host, 1 visible", ""),
    ],
)
def test_gpus(variables, of_host, on_cpu, processes, versions, level, found, fix):
    job = Job("Slurm", None, 16, 3, 1, processes) if processes else None
    finding = host_checks.check_gpus(variables, of_host, on_cpu, job, versions)
    assert finding.level == level
    assert found in finding.found
    assert finding.fix.startswith(fix)


def test_lists_the_gpus_of_a_process():
    job = Job("Slurm", None, 4, 1, 1, 4, (2, 3))
    assert host_checks.check_gpus({}, 8, False, job, CUDA).found == "8 on this host, 8 visible; for this process: 2, 3"


def test_accepts_installed_versions():
    found = host_checks.installed_versions()
    assert {"spmdkit", "jax", "jaxlib"} <= set(found)
    assert [finding.level for finding in host_checks.check_versions(found)] == ["ok"]


@pytest.mark.parametrize(
    ("changes", "found", "fix"),
    [
        ({"jaxlib": "0.9.0"}, ["jax 0.10.2 with jaxlib 0.9.0"], "pip install jaxlib==0.10.2"),
        ({"jax-cuda13-plugin": "0.9.0"}, ["jax 0.10.2 with jax-cuda13-plugin 0.9.0"], "pip install --upgrade"),
        ({"jax-cuda13-plugin": "0.10.2"}, [], ""),
    ],
)
def test_rejects_mismatched_versions(changes, found, fix):
    versions = {"jax": "0.10.2", "jaxlib": "0.10.2", **changes}
    wrong = [finding for finding in host_checks.check_versions(versions) if finding.level == "wrong"]
    assert [finding.found for finding in wrong] == found
    assert all(finding.fix.startswith(fix) for finding in wrong)
