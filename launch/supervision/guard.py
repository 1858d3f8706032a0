"""Kills the processes of a run when their launcher is gone, whatever it died of.

The launcher starts this file as a script in a session of its own and writes the process group of every worker to its
stdin. The pipe closes when the launcher ends, by kill -9 too; then every group still there is killed: workers that hang
or are stopped, and what they started themselves. This works wherever there are process groups and asks nothing of the
workers; the kernel's parent-death signal exists on Linux alone and misses the children of workers.
"""

import os
import signal
import sys


def main() -> None:
    """Reads process groups, one a line, until the pipe closes; then kills them."""
    for group in [int(line) for line in sys.stdin]:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


if __name__ == "__main__":
    main()
