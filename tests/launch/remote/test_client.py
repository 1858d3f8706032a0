"""The client ends as the remote process ended."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from spmdkit.launch.remote import client
from spmdkit.launch.remote.client import VARIABLE
from support.processes import assert_gone
from support.remote import SSH, job, wait_for_text

WAITS = "import os, signal, time; {before}; open({path!r}, 'w').write(str(os.getpid())); time.sleep(60)"


def start(given: dict, ssh=SSH) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", client.__file__, "gpu1", *ssh],
        env={**os.environ, VARIABLE: json.dumps(given)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def run(given: dict, ssh=SSH) -> subprocess.CompletedProcess[str]:
    process = start(given, ssh)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(SSH, process.returncode, out, err)


def waiting(path, before: str = "pass") -> dict:
    return job(WAITS.format(path=str(path), before=before))


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("pass", 0),
        ("exit(3)", 3),
        ("exit(255)", 255),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("import os; os.abort()", 134),
    ],
)
def test_exit_status_is_that_of_the_process(program, code):
    assert run(job(program)).returncode == code


def test_streams_are_separate():
    ended = run(job("import sys; print('out'); print('err', file=sys.stderr)"))
    assert (ended.stdout, ended.stderr) == ("out\n", "err\n")


def test_ignores_output_of_login_scripts():
    noisy = ["/bin/sh", "-c", 'echo "welcome to gpu1"; echo "spmdkit agent old"; exec "$@"', "sh", *SSH]
    assert run(job("print('mine')"), noisy).stdout == "mine\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_passes_signals_on(number, tmp_path):
    catches = f"signal.signal({int(number)}, lambda *_: exit(75))"
    process = start(waiting(tmp_path / "pid", catches))
    wait_for_text(tmp_path / "pid")
    os.killpg(process.pid, number)
    process.communicate(timeout=30)
    assert process.returncode == 75


def test_signal_before_the_connection_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    stopped = client.Client("gpu1", ["touch", str(tmp_path / "began")], {"delay": 0.0, "token": "x"})
    stopped._pass_on(signal.SIGTERM)
    assert stopped.run() == 75
    assert not (tmp_path / "began").exists()


@pytest.mark.parametrize("whole_group", [True, False])
def test_kills_the_process_if_it_is_killed(whole_group, tmp_path):
    process = start(waiting(tmp_path / "pid"))
    pid = int(wait_for_text(tmp_path / "pid"))
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGKILL)
    assert_gone(pid)
    process.communicate(timeout=30)


def test_reports_a_lost_connection(tmp_path):
    process = start(waiting(tmp_path / "pid"))
    pid = int(wait_for_text(tmp_path / "pid"))
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (75, "", "error: the connection to host gpu1 was lost\n")
    assert_gone(pid)


@pytest.mark.slow
@pytest.mark.faults
def test_retries_a_host_that_does_not_answer(tmp_path):
    tried = tmp_path / "tried"
    refuses = ["/bin/sh", "-c", f"echo x >> {tried}; echo 'ssh: Connection refused' >&2; exit 255"]
    start_time = time.monotonic()
    ended = run(job("pass"), refuses)
    assert (ended.returncode, ended.stderr) == (75, "error: host gpu1 does not answer (ssh: ssh: Connection refused)\n")
    assert len(tried.read_text().splitlines()) == len(client.WAITS)
    assert time.monotonic() - start_time >= sum(client.WAITS)
