"""The agent, connected through pipes instead of ssh."""

import io
import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest
from spmdkit.launch.remote import agent as agent_file
from spmdkit.launch.remote import client
from spmdkit.launch.remote.agent import environment
from spmdkit.mesh.exit_codes import TRY_AGAIN
from support.processes import assert_gone
from support.remote import answer, begin, frames, job, wait_for_text

HAS_A_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({path!r}, 'w').write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(60)
"""


@pytest.fixture
def start_agent():
    """Starts agents; what is left of one at the end of a test is killed."""
    started = []

    def start(job):
        started.append(begin(job))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        with process:
            pass


def test_sends_large_output(start_agent):
    found = frames(start_agent(job("for i in range(20000): print(i)")))
    assert found[b"o"] == b"".join(b"%d\n" % number for number in range(20000))


def test_reports_a_missing_command(start_agent):
    agent = start_agent(job("", command=["/no/such/python"]))
    assert agent_file.LOST == client.LOST == TRY_AGAIN, "each file runs alone on a host"
    assert frames(agent) == {b"e": b"error: /no/such/python cannot be started: No such file or directory\n", b"x": b"2"}


@pytest.mark.parametrize("end", ["stdin", "kill the agent", "silence"])
def test_kills_everything_if_the_client_is_lost(end, tmp_path, start_agent):
    silence = 1.0 if end == "silence" else 60.0
    agent = start_agent(job(HAS_A_CHILD.format(path=str(tmp_path / "pids")), silence=silence))
    process, child = map(int, wait_for_text(tmp_path / "pids").split())
    if end == "stdin":
        agent.stdin.close()
    elif end == "kill the agent":
        os.kill(agent.pid, signal.SIGKILL)
    assert_gone(process)
    assert_gone(child)
    agent.wait(timeout=20)


@pytest.mark.slow
def test_heartbeats_keep_the_process(start_agent):
    agent = start_agent(job("import time; time.sleep(3)", silence=1.5))
    for _ in range(12):
        agent.stdin.write(b"here\n")
        time.sleep(0.2)
    assert frames(agent) == {b"x": b"0"}


def test_kills_processes_left_behind(tmp_path, start_agent):
    left = HAS_A_CHILD.format(path=str(tmp_path / "pids")).replace("time.sleep(60)\n", "")
    assert frames(start_agent(job(left)))[b"x"] == b"0"
    assert_gone(int((tmp_path / "pids").read_text().split()[1]))


def test_every_line_is_a_sign_of_life(monkeypatch):
    lines, sent, heard = io.BytesIO(b"\nsignal 10\n"), [], [0.0]
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=lines))
    monkeypatch.setattr(agent_file, "kill_group", lambda *signal: sent.append((*signal, heard[0] > 0)))
    monkeypatch.setattr(agent_file, "give_up", lambda process: sent.append("the client is gone"))
    agent_file.listen(SimpleNamespace(pid=7, poll=lambda: None), heard)
    assert sent == [(7, 10, True), "the client is gone"]


@pytest.mark.slow
def test_agent_survives_a_signal(tmp_path, start_agent):
    agent = start_agent(job("import time; time.sleep(1.5)"))
    time.sleep(0.5)
    agent.send_signal(signal.SIGTERM)
    assert frames(agent) == {b"x": b"0"}


def test_environment_extends_that_of_the_host(monkeypatch):
    monkeypatch.setenv("SPMDKIT_PROCESS_ID", "7")
    monkeypatch.setenv("KERAS_DISTRIBUTION_NUM_PROCESSES", "9")
    monkeypatch.setenv("LANG", "C")
    monkeypatch.setenv("HOME", "/home/me")
    found = environment({"environment": {"LANG": "C.UTF-8"}})
    assert not {"SPMDKIT_PROCESS_ID", "KERAS_DISTRIBUTION_NUM_PROCESSES"} & {*found}
    assert (found["LANG"], found["HOME"]) == ("C.UTF-8", "/home/me")


def question(**more) -> dict:
    return {"do": "probe", "token": "0123456789abcdef", "addresses": ["localhost", "no-such.invalid"], **more}


def test_probe_of_a_host(tmp_path, start_agent):
    (tmp_path / "mark").touch()
    given = question(directory=str(tmp_path), marker="mark")
    found = answer(start_agent(given))
    assert found["python"] == list(sys.version_info[:3])
    assert found["spmdkit"]
    assert found["directory"] == str(tmp_path)
    assert found["marker"]
    assert found["addresses"]["localhost"] in ("127.0.0.1", "::1")
    assert found["addresses"]["no-such.invalid"] is None
    assert 1024 < found["port"] < 65536
    found = answer(start_agent(question(directory="/no/such", marker="mark")))
    assert (found["directory"], found["reason"]) == (None, "No such file or directory")
