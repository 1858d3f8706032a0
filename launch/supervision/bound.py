"""A process that does not outlive its parent, where it is asked to.

`mpirun` that is killed leaves its ranks running: they are in process groups of their own, and nothing tells them. The
kernel does, on Linux.
"""

import ctypes
import os
import signal
import sys

VARIABLE = "SPMDKIT_BOUND"
PR_SET_PDEATHSIG = 1


def bind_to_parent() -> bool:
    """Has the kernel kill this process when its parent ends, where SPMDKIT_BOUND=1 says so.

    Returns:
        Whether it will; not on other systems than Linux.
    """
    if os.environ.get(VARIABLE) != "1" or not sys.platform.startswith("linux"):
        return False
    return ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
