"""Worker processes of other libraries' loaders: one that is killed is a fault of the machine, not of the code.

A PyTorch `DataLoader` notices in two places: where the next batch is waited for, after five seconds, and by a signal
handler, which raises in whatever the main thread is doing. Both say the same, which is recognised here. A worker that
hangs, or is slower than `timeouts.step`, is noticed by the watchdog, as every reader is.
"""

import re
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

LOST = re.compile(r"DataLoader worker \(pid|DataLoader timed out|worker process.* (terminated|killed|died)", re.I)
"""What PyTorch says of a worker that was killed or that is later than the loader's own timeout, and Grain of one."""
REMEDY = (
    "Most are killed for memory: give the loader fewer workers or smaller batches, or, where it speaks of shared "
    "memory, the machine more of that (/dev/shm). The same command goes on from the newest checkpoint."
)


class WorkerLost(RuntimeError):
    """A worker process of a loader is gone; the same command may work."""

    exit_code = 75


def lost_worker(error: BaseException) -> str:
    """What an error says of a worker that is gone, in one line; "" where it tells of none."""
    if isinstance(error, BrokenProcessPool) or (isinstance(error, RuntimeError) and LOST.search(str(error))):
        return " ".join(str(error).split())[:300].rstrip(".")
    return ""


def is_lost_worker(error: Exception) -> bool:
    """Whether an error is that of a lost worker."""
    return isinstance(error, WorkerLost)


def is_of_machine(error: Exception) -> bool:
    """Whether an error is the machine's, and not one of the code that makes a stream."""
    return isinstance(error, OSError | MemoryError | WorkerLost)


@contextmanager
def told_of_lost_worker(what: str) -> Iterator[None]:
    """Turns an error that tells of a lost worker into one that says so.

    Args:
        what: Names what is read.

    Raises:
        WorkerLost: From the error.
    """
    try:
        yield
    except RuntimeError as error:
        said = lost_worker(error)
        if not said:
            raise
        raise WorkerLost(f"{what} has lost a worker process: {said}. {REMEDY}") from error
