"""What a run has left behind on this machine: processes that name its folder."""

import os
import time
from pathlib import Path


def processes_of(folder: Path) -> list[str]:
    """The command lines, with their numbers, of living processes that name a folder, but for this one's own."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(os.fsencode(folder) in word for word in words):
            found.append(f"{entry.name}: {b' '.join(words).decode(errors='replace')}")
    return found


def assert_nothing_left(folder: Path, seconds: float = 15.0) -> None:
    """No process of a run is there, or all go within a few seconds."""
    deadline = time.monotonic() + seconds
    while processes_of(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = processes_of(folder)
    assert not left, "\n".join(left)
