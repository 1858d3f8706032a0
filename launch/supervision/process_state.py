"""The states of processes on this machine that cannot run: stopped by a signal, or frozen with their control group."""

from contextlib import suppress
from pathlib import Path

from ...runtime.ownership import read_stat

RUNS = "runs"
STOPPED = "stopped (SIGSTOP)"
FROZEN = "frozen (cgroup freezer, such as docker pause)"


def read_state(pid: int) -> str:
    """Returns RUNS, STOPPED or FROZEN; "" for a process that has ended, and without /proc."""
    state = read_stat(pid)[:1]
    if not state or state[0] in "ZX":
        return ""
    if state == ["T"]:
        return STOPPED
    return FROZEN if _is_frozen(pid) else RUNS


def _is_frozen(pid: int) -> bool:
    """Returns whether the kernel's freezer holds a process, of version 1 or 2 of control groups."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                events = _read_file("cgroup2", "", path, "cgroup.events")
                if "frozen 1" in events.splitlines():
                    return True
            if "freezer" in controllers.split(","):
                state = _read_file("cgroup", "freezer", path, "freezer.state")
                if state.strip() == "FROZEN":
                    return True
    return False


def _read_file(kind: str, option: str, group: str, name: str) -> str:
    """Returns the contents of a file of a control group; "" if its hierarchy is not mounted here.

    Args:
        kind: The type of the file system: "cgroup" or "cgroup2".
        option: A mount option that the hierarchy must have, or "".
        group: The path of the group.
        name: The name of the file.
    """
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        _, mount, found, options = line.split()[:4]
        if found != kind or (option and option not in options.split(",")):
            continue
        with suppress(OSError):
            return Path(mount, group.lstrip("/"), name).read_text(encoding="utf-8")
    return ""
