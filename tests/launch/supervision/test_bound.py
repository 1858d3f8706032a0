"""A process that is bound to its parent does not outlive it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from spmdkit.launch.supervision.bound import VARIABLE, bind_to_parent

CHILD = """
import os, time
from spmdkit.launch.supervision.bound import bind_to_parent
print(os.getpid(), bind_to_parent(), flush=True)
time.sleep(60)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_nothing_happens_where_nobody_asks(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not bind_to_parent()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal exists on Linux alone")
@pytest.mark.parametrize("bound", [True, False])
def test_its_parent_is_killed(bound):
    environment = {**os.environ, VARIABLE: "1" if bound else "0"}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pid, said = parent.stdout.readline().split()
    assert said == str(bound)
    parent.kill()
    parent.wait()
    assert is_gone(int(pid), 5.0 if bound else 0.5) == bound
    if not bound:
        os.kill(int(pid), signal.SIGKILL)
    parent.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal exists on Linux alone")
def test_its_parent_had_ended_before():
    """The number is that of its parent, or of one that has gone: another process is its parent then."""
    program = f"from {bind_to_parent.__module__} import bind_to_parent; print(bind_to_parent())"
    for number, code, said in ((os.getpid(), 0, "True\n"), (os.getppid(), -signal.SIGKILL, "")):
        environment = {**os.environ, VARIABLE: str(number)}
        ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert (ended.returncode, ended.stdout) == (code, said)


BELOW = """
import subprocess, sys
from spmdkit.launch.supervision.bound import bind_to_parent
bound = bind_to_parent()
below = subprocess.run([sys.executable, "-c", sys.argv[1]], capture_output=True, text=True)
print(bound, below.returncode, below.stdout, end="")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal exists on Linux alone")
def test_what_a_bound_process_starts_is_not_bound():
    """The number is that of the grandparent there: a process that still read it would kill itself."""
    program = f"from {bind_to_parent.__module__} import bind_to_parent; print(bind_to_parent())"
    environment = {**os.environ, VARIABLE: str(os.getpid())}
    command = [sys.executable, "-c", BELOW, program]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.stdout == "True 0 False\n", ended.stderr


def is_gone(pid: int, seconds: float) -> bool:
    """Waits for the end of a process that is not a child."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False
