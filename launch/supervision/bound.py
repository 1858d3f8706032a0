"""A process that does not outlive its parent, where it is asked to.

`mpirun` that is killed leaves its ranks running: they are in process groups of their own, and nothing tells them. A
launcher that is killed between starting a process and telling its guard leaves that one. The kernel kills them, on
Linux.
"""

import ctypes
import os
import signal
import sys

VARIABLE = "SPMDKIT_BOUND"
"""1, or the number of the parent, which a process checks that begins when its parent may have ended already."""
PR_SET_PDEATHSIG = 1


def bind_to_parent() -> bool:
    """Has the kernel kill this process when its parent ends, where SPMDKIT_BOUND says so.

    The variable is taken out of the environment: it is about this process, and not about those that it starts.

    Returns:
        Whether it will; not on other systems than Linux.
    """
    parent = os.environ.pop(VARIABLE, "0")
    if parent == "0" or not sys.platform.startswith("linux"):
        return False
    bound = ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
    if parent not in ("1", str(os.getppid())):
        os.kill(os.getpid(), signal.SIGKILL)
    return bound
