"""Checks of the job, of run.dir, and of all processes together."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

from spmdkit.launch.doctor import job_checks
from spmdkit.launch.doctor.job_checks import Finding, check_coordinator, check_names, check_run_dir
from spmdkit.launch.startup.addresses import Address
from spmdkit.launch.startup.rendezvous import Rendezvous
from spmdkit.launch.startup.variables import Job
from spmdkit.launch.supervision.workers import free_port
from support.launch_cases import SLURM, job_of


def test_every_part_names_its_variable():
    job = job_of(SLURM)
    assert [(finding.found, finding.variable) for finding in job_checks.describe_job(job)] == [
        ("process 3 of 5", "SLURM_PROCID, SLURM_NTASKS"),
        ("detected from Slurm", ""),
        (str(job.address), "SLURM_STEP_NODELIST"),
        ("process 1 of 2 on its host", "SLURM_LOCALID"),
        ("identity: slurm 77.0 restart 0", "SLURM_JOB_ID"),
    ]
    alone = job_checks.describe_job(Job("test", Address("host", 80), 1, 0))
    assert "coordinator" not in {each.name for each in alone}, "a process alone needs none"


def test_rejects_loopback_for_several_hosts():
    (found,) = check_coordinator(Job("test", Address("127.0.0.1", 80), 2, 0), {}, True)
    assert (found.level, found.found) == ("wrong", "127.0.0.1:80 refers to a different host on each host")


def test_notes_a_proxy():
    job = Job("test", Address("127.0.0.1", free_port()), 2, 0)
    found = check_coordinator(job, {"http_proxy": "http://proxy"}, False)[0]
    assert (found.level, found.variable) == ("note", "http_proxy")
    assert check_coordinator(job, {"http_proxy": "http://proxy", "no_proxy": "127.0.0.1"}, False) == []


def test_checks_the_run_dir(tmp_path, monkeypatch):
    monkeypatch.setattr(job_checks.shutil, "disk_usage", lambda folder: SimpleNamespace(free=3 * 2**29))
    found = check_run_dir(tmp_path / "not" / "there")
    assert (found.name, found.level, list(tmp_path.iterdir())) == ("run.dir", "ok", [])
    assert found.found.endswith("writable, 1.5 GiB free")
    assert job_checks.existing_part(tmp_path / "not" / "there" / "yet") == tmp_path
    (tmp_path / "file").write_text("")
    found = check_run_dir(tmp_path / "file" / "run")
    assert (found.level, "is a file" in found.found) == ("wrong", True)
    monkeypatch.setattr(job_checks, "MIN_DISK_SPACE", 2**62)
    found = check_run_dir(tmp_path)
    assert (found.level, found.fix) == ("wrong", "free some space, or set run.dir to another file system")


def test_probes_are_temporary_and_visible(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job_checks, "VISIBLE_SECONDS", 0.2)
    with job_checks.create_marker(tmp_path / "run") as one, job_checks.create_marker(Path("run/x")) as other:
        assert (one.parent, other.parent) == (tmp_path, Path())
        assert job_checks.find_probes(tmp_path / "run", [one.name, other.name], ["a", "b"]).level == "ok"
        assert job_checks.find_probes(tmp_path / "run", [one.name, ""], ["a", "b"]).level == "ok", "none was written"
        found = job_checks.find_probes(tmp_path / "run", [one.name, "another"], ["a", "b"])
        assert found.level == "wrong"
        assert f"files written by b to {tmp_path} are not visible on {socket.gethostname()}" in found.found
    with suppress(OSError), job_checks.create_marker(tmp_path / "run"):
        raise OSError("the check fails")
    assert list(tmp_path.iterdir()) == []


def compare_all(folders, count: int, seconds: float = 30.0) -> list[list[list[Finding]]]:
    job = Job("test", Address("127.0.0.1", free_port()), count, 0)

    def one(rank: int) -> list[list[Finding]]:
        own = [Finding("own", f"of {rank}")]
        versions = {"jax": "0.10.2" if rank else "0.10.1"}
        mine = job._replace(process_id=rank)
        return job_checks.compare(mine, own, folders[rank], versions, on_cpu=True, seconds=seconds)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(len(folders))))


def test_all_processes_get_all_findings(tmp_path):
    found = compare_all([tmp_path, tmp_path], 2)
    assert found[0] == found[1]
    first, second = found[0]
    assert (first[0].found, second[0].found) == ("of 0", "of 1")
    wrong = [finding.found for finding in first if finding.level == "wrong"]
    assert wrong == ["jax: 0.10.1 on rank 0, 0.10.2 on rank 1"]
    assert any(finding.found == f"all 2 processes see the same {tmp_path}" for finding in second)
    assert any(finding.found.startswith("all 2 have connected: 2 on ") for finding in first)
    assert any(finding.found.startswith("listens on 127.0.0.1:") for finding in first)
    assert list(tmp_path.iterdir()) == []


def meeting(**changes) -> Rendezvous:
    notes = [{"own_ip": "10.0.0.1"}] * 3
    return Rendezvous(["a", "a", "b"], notes, None)._replace(**changes)


def test_rejects_host_names_on_loopback():
    assert check_names(meeting(), on_cpu=True) == []
    loopback = meeting(notes=[{"own_ip": "127.0.1.1"}] * 3)
    assert "resolves its own name to 127.0.1.1" in check_names(loopback, on_cpu=True)[0].found
    assert check_names(loopback, on_cpu=False) == []
