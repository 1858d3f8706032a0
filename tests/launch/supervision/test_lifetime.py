"""A process ends with its launcher, also if that is killed before the process has begun, or with a process between."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from spmdkit.launch.supervision import lifetime
from spmdkit.launch.supervision.lifetime import BOUND_VARIABLE, bind_to_launcher, bound_to
from support.processes import assert_gone, process_state

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel's parent-death signal exists on Linux alone"
)

CHILD = """
import os, time
from spmdkit.launch.supervision.lifetime import bind_to_launcher
print(os.getpid(), bind_to_launcher(), "SPMDKIT_BOUND" in os.environ, flush=True)
time.sleep(60)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.slow
@pytest.mark.parametrize("bound", [True, False])
def test_bound_process_dies_with_its_parent(bound):
    environment = {**os.environ, BOUND_VARIABLE: "1" if bound else "0"}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pid, *said = parent.stdout.readline().split()
    assert said == [str(bound), "False"], "the variable would apply to children"
    parent.kill()
    parent.wait()
    if bound:
        assert_gone(int(pid))
    else:
        time.sleep(0.5)
        assert process_state(int(pid))
        os.kill(int(pid), signal.SIGKILL)
    parent.stdout.close()


@pytest.mark.slow
def test_bound_process_dies_if_its_launcher_had_ended():
    """The number is that of its parent, or of a launcher that has gone: another process is its parent then."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    program = f"from {bind_to_launcher.__module__} import bind_to_launcher; print(bind_to_launcher())"
    for value, code, said in (
        (bound_to(os.getpid()), 0, "True\n"),
        (bound_to(gone.pid), -signal.SIGKILL, ""),
        (f"{gone.pid}@another machine", 0, "True\n"),
    ):
        environment = {**os.environ, BOUND_VARIABLE: value}
        ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert (ended.returncode, ended.stdout) == (code, said)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["launcher", "mpirun"])
def test_bound_process_dies_with_any_process_between_it_and_its_launcher(killed):
    """Launcher, mpirun, a program of launch.prefix, and the process: the prefix outlives both."""
    launcher = (
        "import os, subprocess, sys; from spmdkit.launch.supervision.lifetime import bound_to;"
        "os.environ['SPMDKIT_BOUND'] = bound_to(os.getpid());"
        "subprocess.run([sys.executable, '-c', sys.argv[1], 'mpirun', sys.argv[2], sys.argv[3]])"
    )
    mpirun = (
        "import os, subprocess, sys; print(os.getpid(), flush=True);"
        "subprocess.run([sys.executable, '-c', *sys.argv[2:]])"
    )
    words = [sys.executable, "-c", launcher, mpirun, PARENT, CHILD]
    first = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    between = int(first.stdout.readline())
    pid = int(first.stdout.readline().split()[0])
    assert process_state(pid)
    os.kill(first.pid if killed == "launcher" else between, signal.SIGKILL)
    assert_gone(pid)
    first.kill()
    first.wait()
    first.stdout.close()


def test_processes_of_a_worker_are_not_bound_to_its_launcher(monkeypatch):
    asked = []
    monkeypatch.setattr(
        lifetime.ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *words: asked.append(words) or 0)
    )
    monkeypatch.setenv(BOUND_VARIABLE, bound_to(os.getppid()))
    assert [bind_to_launcher(), bind_to_launcher()] == [True, False]
    assert len(asked) == 1
