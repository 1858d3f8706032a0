"""The whole command, in one process and in two, and the output of findings."""

import json
import socket

import pytest
from spmdkit.launch.doctor import findings
from spmdkit.launch.doctor.findings import format_finding, format_json, format_text
from spmdkit.launch.doctor.job_checks import Finding
from spmdkit.launch.startup.worker import job_environment
from spmdkit.launch.supervision.workers import free_port
from support.processes import start_each, wait
from support.runs import write_config


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path)


def test_reports_no_problems(config, cli):
    printed = cli(0, "doctor", config).out
    assert printed.startswith("spmdkit doctor\n")
    assert "ok    job           one process: no variable sets a number of processes" in printed
    assert "8 simulated CPU devices in each process" in printed
    assert printed.endswith("No problems found.\n")
    names = ("job", "versions", "devices", "cores", "memory", "open files", "host name", "run.dir")
    assert [name for name in names if f"  ok    {name} " not in printed and f"  note  {name} " not in printed] == []
    assert not (config.parent / "run").exists()


@pytest.mark.slow_cases("arguments0-variables0-config-train.stps is not a valid key")
@pytest.mark.parametrize(
    ("arguments", "variables", "name", "found"),
    [
        (["train.stps=3"], {}, "config", "train.stps is not a valid key"),
        ([], {"SPMDKIT_PROCESS_ID": "1"}, "job", "With SPMDKIT_PROCESS_ID=1, this process is one of several"),
        ([], {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"}, "job", "this is the batch script itself"),
        (["run.dir=/proc/nothing"], {}, "run.dir", "/proc/nothing"),
    ],
)
def test_reports_problems(arguments, variables, name, found, config, cli, monkeypatch):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    values = json.loads(cli(2, "doctor", config, "--json", *arguments, "run.simulate=8").out)
    assert not values["ok"]
    wrong = [each["found"] for each in values["findings"] if each["name"] == name and each["level"] == "wrong"]
    assert any(found in each for each in wrong)


@pytest.mark.parametrize(
    ("rank", "host", "message"),
    [
        ("3", "127.0.0.1", "Rank 0 was not reachable at"),
        ("0", "127.0.0.1", "is in use on"),
        ("3", "no-such-host.invalid", "'no-such-host.invalid' (SPMDKIT_JOB_ADDRESSES) is unknown on"),
    ],
)
def test_a_process_that_meets_no_other_reports_its_own_rank(rank, host, message, cli, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] if rank == "0" else free_port()
        job = {"JOB_ADDRESSES": f"{host}:{port}", "NUM_PROCESSES": "4", "PROCESS_ID": rank, "SIMULATE": "2"}
        for name, value in job.items():
            monkeypatch.setenv(f"SPMDKIT_{name}", value)
        findings = json.loads(cli(2, "doctor", "--json", "--wait", "0.3").out)["findings"]
    (wrong,) = (finding for finding in findings if finding["level"] == "wrong")
    assert wrong["name"] == "processes"
    assert message in wrong["found"]
    assert all(finding["ranks"] == [int(rank)] for finding in findings)


@pytest.mark.parametrize(
    ("simulated", "has_gpus", "on_cpu"), [(None, True, False), (None, False, True), ("2", True, True)]
)
def test_devices_of_the_processes_are_gpus_unless_simulated(simulated, has_gpus, on_cpu, cli, monkeypatch):
    found, on_host = [], []
    monkeypatch.setattr(findings, "has_accelerators", lambda: has_gpus)
    monkeypatch.setattr(findings, "check_machine", lambda devices: on_host.append(devices) or [])
    monkeypatch.setattr(findings, "compare", lambda *_, **options: found.append(options["on_cpu"]) or [])
    for name, value in job_environment(
        "127.0.0.1:1", 4, 0, simulate=simulated, local_rank=0, local_processes=3
    ).items():
        monkeypatch.setenv(name, value)
    cli(0, "doctor")
    assert (found, on_host) == ([on_cpu], [3 * int(simulated or 0)])


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_rejects_invalid_times_to_wait(seconds, cli):
    assert "--wait must be more than 0 seconds and less than a day, got" in cli(2, "doctor", f"--wait={seconds}").err


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_together(config):
    ended = wait(start_each([("doctor", config)] * 2))
    assert [each.code for each in ended] == [0, 0], ended
    printed = ended[0].stdout
    assert printed.startswith("spmdkit doctor of 2 processes\n")
    assert "rank 1: process 1 of 2 (SPMDKIT_PROCESS_ID, SPMDKIT_NUM_PROCESSES)" in printed
    assert "all 2 have connected: 2 on" in printed
    assert "all 2 processes see the same" in printed
    assert ended[1].stdout == ""
    assert not (config.parent / "run").exists()


FINE = Finding("host name", "a is 10.0.0.1")
BAD = Finding("GPUs", "none visible", "wrong", "unset CUDA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def test_format_finding():
    assert format_finding(FINE) == ["  ok    host name     a is 10.0.0.1"]
    assert format_finding(BAD, "rank 3") == [
        "  WRONG GPUs          rank 3: none visible (CUDA_VISIBLE_DEVICES)",
        "                      fix: unset CUDA_VISIBLE_DEVICES",
    ]
    found = {"name": "GPUs", "found": "none visible", "level": "wrong", "fix": BAD.fix, "variable": BAD.variable}
    assert json.loads(format_json([[FINE], [FINE, BAD]], 2))["findings"][1] == {**found, "ranks": [3]}


def test_common_findings_are_listed_once():
    own = Finding("host name", "b is 10.0.0.2")
    assert format_text([[FINE, BAD], [own, BAD]]).splitlines()[2:-2] == [
        "  ok    host name     rank 0: a is 10.0.0.1",
        "  ok    host name     rank 1: b is 10.0.0.2",
        *format_finding(BAD),
    ]
