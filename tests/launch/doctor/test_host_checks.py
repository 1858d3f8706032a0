"""Checks of the host."""

import os

import pytest
from spmdkit.launch.doctor import host_checks
from spmdkit.launch.doctor.job_checks import GIB
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


@pytest.mark.parametrize("simulated", [0, 2])
def test_notes_the_known_faults_of_jaxlib_on_its_devices(simulated, monkeypatch):
    monkeypatch.setattr(host_checks, "count_gpus", lambda: 0)
    found = host_checks.check_devices(environ(), simulated, None, {"jaxlib": "0.10.2"})
    assert [(each.name, each.level) for each in found] == [("devices", "ok"), ("known faults", "note")]
    assert found[1].found.startswith("jaxlib 0.10.2 on cpu: jitted `vmap")
    assert "github.com/jax-ml/jax/issues/" in found[1].found
    assert found[1].fix == "install jaxlib 0.10.1, 0.11.0 or newer"
    assert len(host_checks.check_devices(environ(), simulated, None, {"jaxlib": "0.12.0.1"})) == 1


CUDA = {"jax-cuda13-plugin": "0.10.2"}


def environ(**variables: str) -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", **variables}


def test_does_not_open_simulated_devices(monkeypatch):
    monkeypatch.setattr(host_checks, "PROGRAM", "raise SystemExit('opened')")
    assert [finding.level for finding in host_checks.check_devices({}, 8, None, {})] == ["ok"]


@pytest.mark.slow
def test_opens_devices_in_a_child(monkeypatch):
    monkeypatch.setattr(host_checks, "count_gpus", lambda: 0)
    (found,) = host_checks.check_devices(environ(JAX_NUM_CPU_DEVICES="3", SPMDKIT_NUM_PROCESSES="2"), 0, None, {})
    assert (found.level, found.found) == ("ok", "cpu: 3 x cpu")


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("import sys; sys.exit('no driver')", "could not open its devices (exit code 1): no driver"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "could not open its devices (killed by signal 11)"),
        ("import time; time.sleep(60)", "JAX did not open its devices within 0 s"),
    ],
)
def test_reports_devices_that_do_not_open(program, found, monkeypatch):
    monkeypatch.setattr(host_checks, "PROGRAM", program)
    opened = host_checks.open_devices(environ(), seconds=60 if "sleep" not in program else 0.4)
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
