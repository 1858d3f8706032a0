import signal
import subprocess
import sys

import pytest
from spmdkit.launch.supervision.workers import GUARD

pytestmark = pytest.mark.multiprocess


def test_kills_every_group_when_its_pipe_closes():
    sleepers = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0) for _ in range(2)
    ]
    gone = subprocess.Popen([sys.executable, "-c", ""], process_group=0)
    gone.wait()
    groups = "".join(f"{process.pid}\n" for process in (sleepers[0], gone, sleepers[1]))
    subprocess.run([sys.executable, str(GUARD)], input=groups, text=True, check=True, timeout=20)
    assert [process.wait(timeout=5) for process in sleepers] == [-signal.SIGKILL] * 2


def test_does_nothing_while_its_pipe_is_open():
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0)
    guard = subprocess.Popen([sys.executable, str(GUARD)], stdin=subprocess.PIPE)
    assert guard.stdin is not None
    guard.stdin.write(f"{sleeper.pid}\n".encode())
    guard.stdin.flush()
    with pytest.raises(subprocess.TimeoutExpired):
        guard.wait(timeout=0.5)
    assert sleeper.poll() is None
    guard.stdin.close()
    assert guard.wait(timeout=5) == 0
    assert sleeper.wait(timeout=5) == -signal.SIGKILL
