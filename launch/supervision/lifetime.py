"""Ends a process with the launcher that started it, however the launcher or a process between them ends.

Imports little, so that a process can call it first: until then, it outlives a launcher that is killed.
"""

import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

BOUND_VARIABLE = "SPMDKIT_BOUND"
"""The launcher of a process, from `bound_to`; or 1 = its parent, whatever that is."""
PARENT_ONLY = "1"
PR_SET_PDEATHSIG = 1


def bound_to(launcher: int) -> str:
    """Returns the value of BOUND_VARIABLE for the processes of a launcher: its process id, and its machine."""
    return f"{launcher}@{_machine()}"


def bind_to_launcher() -> bool:
    """Asks the kernel to kill this process when its parent ends, if SPMDKIT_BOUND says so; on Linux only.

    A parent that is killed before this call gives no signal anymore: therefore, the launcher must still be the parent
    of this process, or of its parent (mpirun, a program of `launch.prefix`), and so on; otherwise this process is
    killed at once. On another machine, or in a container with process ids of its own, the launcher is not visible, and
    only the parent counts. The variable is removed from the environment: it does not apply to processes that this one
    starts.

    Returns:
        Whether the kernel will kill it.
    """
    value = os.environ.pop(BOUND_VARIABLE, "0")
    if value == "0" or not sys.platform.startswith("linux"):
        return False
    is_bound = ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
    launcher, _, machine = value.partition("@")
    if value == PARENT_ONLY or machine != _machine():
        return is_bound
    between = _find_ancestors(int(launcher))
    if not between:
        os.kill(os.getpid(), signal.SIGKILL)
    if len(between) > 1:
        _follow(between[1:])
    return is_bound


def _machine() -> str:
    """Returns the boot of this machine and its namespace of process ids; "" without /proc."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def _find_ancestors(last: int) -> list[int]:
    """Returns the ancestors of this process, from its parent to `last`; none if `last` is not an ancestor."""
    ancestors = []
    pid = os.getppid()
    while pid > 0:
        ancestors.append(pid)
        if pid == last:
            return ancestors
        pid = _parent_of(pid)
    return []


def _parent_of(pid: int) -> int:
    """Returns the parent of a process; 0 if it has none, or has ended."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return int(fields[1])
    return 0


def _follow(ancestors: Sequence[int]) -> None:
    """Kills this process when one of its further ancestors ends, of which the kernel does not tell it."""
    poll = select.poll()
    try:
        for pid in ancestors:
            poll.register(os.pidfd_open(pid), select.POLLIN)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
    except OSError:  # a kernel before 5.3, or a sandbox
        return

    def wait() -> None:
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="launcher", daemon=True).start()
