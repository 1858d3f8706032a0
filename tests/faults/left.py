"""Processes that are left of a run, found by what stands on their command line."""

import os
import time
from pathlib import Path


def processes_of(text: str | Path) -> list[int]:
    """The processes of this machine, but this one, with a text among their arguments."""
    wanted, found = str(text).encode(), []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            if wanted in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait_until_none_of(text: str | Path, seconds: float = 20.0) -> list[int]:
    """Waits until no process has a text among its arguments; gives those that still have."""
    deadline = time.monotonic() + seconds
    while (found := processes_of(text)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def wait_for(condition, seconds: float = 120.0) -> None:
    """Waits until something holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (number - 1) & 1)
