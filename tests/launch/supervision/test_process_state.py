"""The state of a process that cannot run, from the kernel."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from spmdkit.launch.supervision.process_state import FROZEN, RUNS, STOPPED, read_state
from support.processes import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_reads_stopped_and_ended_processes(sleeper):
    assert read_state(sleeper.pid) == RUNS
    sleeper.send_signal(signal.SIGSTOP)
    wait_for(lambda: read_state(sleeper.pid) == STOPPED)
    sleeper.kill()
    wait_for(lambda: read_state(sleeper.pid) == "")


def _groups() -> dict[str, tuple[Path, str, str]]:
    """The hierarchies of control groups in which this machine can freeze: folder, file, and the text that freezes."""
    found = {}
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, options = line.split()[:4]
        if kind == "cgroup" and "freezer" in options.split(","):
            found["version 1"] = (Path(mount), "freezer.state", "FROZEN")
        if kind == "cgroup2":
            found["version 2"] = (Path(mount), "cgroup.freeze", "1")
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a control group: run this as root")
@pytest.mark.parametrize("version", ["version 1", "version 2"])
def test_reads_frozen_process(version, sleeper):
    if version not in _groups():
        pytest.skip("no such control groups on this machine")
    root, name, text = _groups()[version]
    group = root / f"spmdkit-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("control groups cannot be made in this container")
    try:
        (group / "cgroup.procs").write_text(str(sleeper.pid))
        (group / name).write_text(text)
        wait_for(lambda: read_state(sleeper.pid) == FROZEN)
        (group / name).write_text({"FROZEN": "THAWED", "1": "0"}[text])
        wait_for(lambda: read_state(sleeper.pid) == RUNS)
    finally:
        sleeper.kill()
        sleeper.wait()
        with suppress(OSError):
            group.rmdir()
