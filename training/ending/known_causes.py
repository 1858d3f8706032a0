"""Errors that Python, JAX or the machine raises and whose cause is known: files, memory, modules that are missing.

What is not known here is an error of ours.
"""

import errno
import os
import sys
import traceback
from typing import NamedTuple

from ...mesh.errors import UserError
from .lost_peers import tells_of_lost_peer

TRY_AGAIN = 75
"""As in exits.py, which imports this file."""

OF_THE_MACHINE = {
    errno.ENOSPC: "Make room there",
    errno.EDQUOT: "Make room there, or ask for a larger quota",
    errno.EIO: "The disk or the network file system fails: repair it",
    errno.EROFS: "The file system is mounted read-only: mount it for writing, or choose another folder",
    errno.ESTALE: "The network file system has lost the file: mount it again",
    errno.ENOMEM: "Free some memory",
    errno.EMFILE: "Raise the number of open files (ulimit -n)",
    errno.ENFILE: "Close some files: the machine has no handle left",
    errno.EADDRINUSE: "Close programs that listen on ports of this machine",
    errno.ETIMEDOUT: "The file system does not answer: repair it",
}
"""What is wrong with the machine, and the remedy; the same command may work later."""
OF_THE_PATH = {
    errno.EACCES: "Give yourself permission (chmod), or name another",
    errno.EPERM: "Give yourself permission, or name another",
    errno.ENOENT: "Check that it is there and was not removed during the run",
    errno.EEXIST: "Move what is in its place away, or name another",
    errno.ENOTDIR: "A file stands where a folder should be: name another",
    errno.EISDIR: "A folder stands where a file should be: move it away, or name another",
    errno.ENOTEMPTY: "Empty the folder, or name another",
    errno.ENAMETOOLONG: "Choose a shorter name: a part of a path has 255 bytes at most",
    errno.ELOOP: "Links go round in a circle: name another",
    errno.EFBIG: "The file would be larger than allowed (ulimit -f)",
}
"""What is wrong with a path that somebody chose, and the remedy."""
MEMORY_REMEDY = (
    "Lower train.global_batch, data.length or the sizes of the model, raise train.accumulate, set train.remat to full, "
    "or split over more devices (strategy.fsdp); `spmdkit explain` shows what each device holds. On the CPU, close "
    "other programs, or raise the limit (ulimit -v)."
)
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")
"""What XLA says where an allocation fails."""
NO_MEMORY_TO_LOAD = ("cannot allocate memory", "failed to map segment", "can't start new thread")
"""What the loader and the threads say, in lower case."""


class Cause(NamedTuple):
    """Why something failed.

    Attributes:
        exit_code: What the command line exits with.
        message: What happened, and the remedy.
    """

    exit_code: int
    message: str


def known_cause(error: BaseException) -> Cause | None:
    """Explains an error that is not spmdkit's own.

    Args:
        error: What was raised.

    Returns:
        The cause; None where nobody foresaw it.
    """
    if is_out_of_memory(error):
        return Cause(TRY_AGAIN, f"There is not enough memory: {_first_line(error)}. {MEMORY_REMEDY}")
    if isinstance(error, RuntimeError):
        return _lost_worker(error)
    if isinstance(error, ModuleNotFoundError):
        return _missing_module(error)
    if isinstance(error, OSError):
        return _of_a_file(error)
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether Python, NumPy, XLA or the system had no memory left."""
    if isinstance(error, MemoryError):
        return True
    text = str(error)
    if type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError"):
        return any(words in text for words in OUT_OF_MEMORY)
    return isinstance(error, ImportError | RuntimeError | OSError) and any(
        words in text.lower() for words in NO_MEMORY_TO_LOAD
    )


def is_lost_peer(error: BaseException) -> bool:
    """Tells whether JAX gave up because another process of the run is gone: nothing is wrong with this one.

    Args:
        error: What was raised, maybe because of such an error.
    """
    return _of_jax(error) is not None


def lost_peer(error: BaseException) -> Cause:
    """Explains an error that comes of the loss of another process."""
    return Cause(
        TRY_AGAIN,
        f"This process has lost another one of its run: {_first_line(_of_jax(error) or error)}. The cause is in the "
        "log of the one that ended first; the same command goes on from the newest checkpoint.",
    )


def _of_jax(error: BaseException | None) -> BaseException | None:
    """The error of JAX that says so, among those that an error comes of."""
    while error is not None:
        if type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") and tells_of_lost_peer(str(error)):
            return error
        error = error.__cause__
    return None


def _lost_worker(error: RuntimeError) -> Cause | None:
    """A worker process of a loader, as a signal handler of PyTorch tells of it in the main thread."""
    from ...data.sources.workers import REMEDY, lost_worker  # here, as a process that only supervises reads no data

    said = lost_worker(error)
    return Cause(TRY_AGAIN, f"A loader has lost a worker process: {said}. {REMEDY}") if said else None


def _of_a_file(error: OSError) -> Cause | None:
    """A file or folder that cannot be read or written."""
    reason = error.strerror or type(error).__name__
    where = " -> ".join(
        os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)
    )
    if error.errno in OF_THE_MACHINE:
        place = f"{where}: {reason}" if where else reason
        remedy = OF_THE_MACHINE[error.errno]
        return Cause(TRY_AGAIN, f"{place}. {remedy}, then start the same command again: a run goes on where it was.")
    if error.errno == errno.ENOENT and not where and _lost_working_directory():
        return Cause(UserError.exit_code, "The working directory was removed. Change to another (cd), then try again.")
    if error.errno == errno.EFBIG and not where:
        return Cause(UserError.exit_code, f"{reason}. {OF_THE_PATH[errno.EFBIG]}.")
    if error.errno in OF_THE_PATH and where:
        return Cause(UserError.exit_code, f"{where}: {reason}. {OF_THE_PATH[error.errno]}.")
    return None


def _lost_working_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _missing_module(error: ModuleNotFoundError) -> Cause | None:
    """A module that a user's file, or this package, imports and that is not there."""
    name = error.name or ""
    if not name or name.split(".")[0] == __name__.split(".")[0]:
        return None
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    by = f", which {frames[-1].filename} line {frames[-1].lineno} imports" if frames else ""
    return Cause(
        UserError.exit_code,
        f"There is no module {name}{by}. Install it for {sys.executable or 'this Python'}, or put its folder on "
        "PYTHONPATH.",
    )


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200].rstrip('.')}" if lines else type(error).__name__
