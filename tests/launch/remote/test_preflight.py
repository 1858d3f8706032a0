"""The command line of ssh, its errors, and the selection of hosts by their answers."""

import subprocess
import sys

import pytest
from spmdkit.configs.schema import Config, RunConfig, Timeouts
from spmdkit.launch.launchers import LaunchJob, LaunchRequest
from spmdkit.launch.remote import preflight
from spmdkit.launch.remote.hosts import Host, Hosts
from spmdkit.launch.remote.preflight import check_host, check_hosts, explain_failure, ssh_command
from spmdkit.launch.supervision.attempts import NotNow
from spmdkit.mesh.errors import UserError

ONE, TWO = (Host(name=name, processes=2, python="python3", directory="/") for name in ("one", "two"))
BOTH = Hosts(hosts=(ONE, TWO), source="hosts.yaml")
GONE = NotNow("does not answer (timed out)")
MISTAKE = UserError("it refuses the login")


JOB = LaunchJob(LaunchRequest("quickstart"), Config(run=RunConfig(dir="runs/x"), timeouts=Timeouts(heartbeat=30)))


def good(**changed) -> dict:
    """The answer of a host that has everything."""
    found = {"python": list(sys.version_info[:3]), "spmdkit": True, "directory": "/", "marker": True, "gpus": 0}
    return {**found, "port": 5000, "addresses": {"one": "10.0.0.1", "two": "10.0.0.2"}, **changed}


def told(answer: dict, gpus_per_process: int = 0) -> str:
    return "\n".join(check_host(ONE, answer, Hosts(hosts=(ONE,), gpus_per_process=gpus_per_process), JOB))


def test_accepts_a_complete_host():
    assert told(good()) == ""


def test_reports_unmet_requirements():
    assert "python3 is Python 3.9.2; spmdkit needs 3.11 or newer." in told(good(python=[3, 9, 2]))
    assert "python3 lacks spmdkit. Install it there" in told(good(spmdkit=False))
    assert "missing directory / (gone). Set directory" in told({**good(directory=None, reason="gone")})
    assert "run.dir runs/x is not the directory of this machine, relative to /. All" in told(good(marker=False))


def test_reports_too_few_gpus():
    assert "2 processes x 4 GPUs = 8, but it has 4." in told(good(gpus=4), gpus_per_process=4)
    assert told(good(gpus=8), gpus_per_process=4) == ""
    assert told(good(gpus=0), gpus_per_process=4) == "", "they may be of another maker"


@pytest.mark.parametrize(
    ("address", "ip", "problem"),
    [
        ("one", "10.0.0.1", ""),
        ("one", "127.0.1.1", "it resolves one, the first host, to 127.0.1.1. Set an address of the first host in the"),
        ("one", None, "it resolves one, the first host, to nothing. Set an address"),
        ("127.0.0.1", "127.0.0.1", ""),  # all hosts are one machine
        ("localhost", "127.0.0.1", ""),
    ],
)
def test_hosts_must_reach_the_first(address, ip, problem):
    first = Host(name="one", address=address)
    found = list(check_host(TWO, good(addresses={address: ip}), Hosts(hosts=(first, TWO)), JOB))
    assert len(found) == bool(problem)
    assert "".join(found).startswith(problem)


def answered(monkeypatch, one, two) -> int:
    """The outcome of a preflight of two hosts with these answers."""
    monkeypatch.setattr(preflight, "ask", lambda *_: [one, two])
    return check_hosts(BOTH, JOB)


def test_reports_problems_of_all_hosts(monkeypatch):
    with pytest.raises(UserError) as raised:
        answered(monkeypatch, good(spmdkit=False), MISTAKE)
    first, *rest = str(raised.value).splitlines()
    assert first == "2 problems with the hosts of hosts.yaml:"
    assert [line.split(":")[0] for line in rest] == ["  one", "  two"]


def test_problems_come_before_unavailable_hosts(monkeypatch):
    with pytest.raises(UserError, match="1 problem with the hosts"):
        answered(monkeypatch, MISTAKE, GONE)
    with pytest.raises(NotNow, match=r"^host two does not answer \(timed out\)$"):
        answered(monkeypatch, good(), GONE)


def test_port_is_that_of_the_first_host(monkeypatch):
    assert answered(monkeypatch, good(port=2), good(port=1)) == 2


def command(host: Host, *ssh: str, heartbeat: float = 30) -> list[str]:
    return ssh_command(Hosts(hosts=(host,), ssh=ssh), host, heartbeat)


def test_options_of_the_file_come_first():
    words = command(Host(name="me@gpu1", port=2222, python="python3"), "-o", "ConnectTimeout=3")
    assert words[:3] == ["ssh", "-o", "ConnectTimeout=3"]
    assert words.index("ConnectTimeout=3") < words.index("ConnectTimeout=10")
    assert words[words.index("-p") + 1] == "2222"
    assert words[-3:-1] == ["--", "me@gpu1"]
    assert "BatchMode=yes" in words


def test_ssh_detects_a_lost_host_before_the_heartbeat():
    words = command(Host(name="gpu1", python="~/my venv/python"), heartbeat=30)
    assert words[-1].startswith("exec ~/'my venv/python' -c ")
    assert {"ServerAliveInterval=5", "ServerAliveCountMax=3"} <= set(words)
    assert "ServerAliveInterval=1" in command(Host(name="gpu1", python="python3"), heartbeat=3)


def test_command_is_quoted_for_a_shell(tmp_path):
    folder = tmp_path / "it's a $folder"
    folder.mkdir()
    (folder / "python").write_text('#!/bin/sh\necho "$0" "$#" "$1"\n')
    (folder / "python").chmod(0o755)
    there = command(Host(name="gpu1", python=str(folder / "python")))[-1]
    ended = subprocess.run(["/bin/sh", "-c", there], capture_output=True, text=True, check=True)
    assert ended.stdout == f"{folder}/python 2 -c\n"


@pytest.mark.parametrize(
    ("code", "said", "error", "message"),
    [
        (255, "ssh: Could not resolve hostname gpu1: Name or service not known", UserError, "ssh cannot log in (ssh: "),
        (255, "No key is known.\nHost key verification failed.", UserError, "ssh cannot log in (Host key verification"),
        (255, "me@gpu1: Permission denied (publickey).", UserError, "ssh cannot log in (me@gpu1: Permission denied"),
        (255, "line 0: Bad configuration option: nosuch", UserError, "ssh cannot log in (line 0: Bad configuration"),
        (255, "ssh: connect to host gpu1 port 22: Connection refused", NotNow, "does not answer (ssh: connect to host"),
        (255, "No route to host", NotNow, "does not answer (No route to host)"),
        (255, "", NotNow, "does not answer (no message)"),
        (127, "bash: exec: python3: not found", UserError, "python3 cannot run there (exit code 127: bash: exec: pyt"),
    ],
)
def test_only_a_host_that_does_not_answer_may_do_so_later(code, said, error, message):
    found = explain_failure(code, said, ONE)
    assert isinstance(found, error)
    assert str(found).startswith(message)
    assert ("Correct it until `ssh one` logs in without a question." in str(found)) == ("log in" in message)
