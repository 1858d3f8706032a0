"""Reports errors on stderr with their exit codes; explains known errors of Python, JAX and the machine."""

import errno
import os
import re
import sys
import traceback
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

from .errors import printable
from .exit_codes import FAILED, FINISHED, INVALID_INPUT, TRY_AGAIN

MAX_LINE = 1500
"""The maximum length of a printed line."""

TRACEBACK_VARIABLE = "SPMDKIT_TRACEBACK"
RELAYED = {"SPMDKIT_RELAYED": "1"}
"""Variables of a process under a launcher that relays its output: it marks the lines of its error."""
MARK = "\x02\x02"
"""The prefix of these lines. The launcher removes it, and prints the error of one process after all have ended."""
PLEASE_REPORT = (
    "This is an error that spmdkit did not foresee, not a mistake in your config. Please report it with the traceback "
    "above, the config, and what `pip list` says of jax."
)

LOST = re.compile(
    r"\bGloo [\w -]{1,60} failed"
    r"|gloo::EnforceNotMet"
    r"|gloo[^\n]{0,200}(?:closed by peer|reset by peer|Broken pipe|Timed out waiting)"
    r"|JAX distributed service detected fatal errors"
    r"|\bcoordination service\b|CoordinationService|stopped sending heartbeats"
    r"|\bBarrier (?:timed out|failed)|[Ss]hutdown barrier"
    r"|ncclRemoteError|ncclSystemError|NCCL [^\n]{0,200}remote (?:process|peer)"
)
UNHEALTHY = "stopped sending heartbeats):"
TASK = re.compile(r"[\s,]*(?:/job:\w+(?:/replica:\d+)?/task:)?(\d+)(?=[\s,]|$)")


def reports_lost_peer(text: str) -> bool:
    """Returns True if the output or error message of a process reports that it lost another process."""
    return LOST.search(text) is not None


def ranks_without_heartbeat(text: str) -> list[int]:
    """Returns the ranks without heartbeats that JAX's coordination service lists in the output of a process."""
    _, named, rest = text.partition(UNHEALTHY)
    ranks = []
    while named and (task := TASK.match(rest)):
        ranks.append(int(task.group(1)))
        rest = rest[task.end() :]
    return ranks


MACHINE_FIXES = {
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
"""Errors of the machine and their fixes; the same command can work later."""
PATH_FIXES = {
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
"""Errors of a path from the user, and their fixes."""
MEMORY_REMEDY = (
    "Lower train.global_batch, data.length or the sizes of the model, raise train.accumulate, set train.remat to full, "
    "or split over more devices (strategy.fsdp); `spmdkit explain` shows what each device holds. On the CPU, close "
    "other programs, or raise the limit (ulimit -v)."
)
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")
"""In XLA's message if an allocation fails."""
NO_MEMORY_TO_LOAD = ("cannot allocate memory", "failed to map segment", "can't start new thread")
"""In messages of the loader and of threads, in lowercase."""


LOST_WORKER = re.compile(
    r"DataLoader worker \(pid|DataLoader timed out|worker process.* (terminated|killed|died)", re.I
)
"""In messages of PyTorch and Grain about a killed or late worker."""
WORKER_REMEDY = (
    "Most are killed for lack of memory: use fewer workers or smaller batches, or, if the message mentions shared "
    "memory, increase /dev/shm. The same command resumes from the latest checkpoint."
)


class Cause(NamedTuple):
    """The cause of a failure: the exit code, and a message with the fix."""

    exit_code: int
    message: str


def known_cause(error: BaseException) -> Cause | None:
    """Returns the cause of an error that is not spmdkit's own, or None if it is unexpected."""
    if is_out_of_memory(error):
        return Cause(TRY_AGAIN, f"There is not enough memory: {_first_line(error)}. {MEMORY_REMEDY}")
    if isinstance(error, RuntimeError):
        message = lost_worker(error)
        return Cause(TRY_AGAIN, f"A loader has lost a worker process: {message}. {WORKER_REMEDY}") if message else None
    if isinstance(error, ModuleNotFoundError):
        return _missing_module(error)
    if isinstance(error, OSError):
        return _file_cause(error)
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if Python, NumPy, XLA or the system ran out of memory."""
    if isinstance(error, MemoryError):
        return True
    text = str(error)
    if type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError"):
        return any(words in text for words in OUT_OF_MEMORY)
    return isinstance(error, ImportError | RuntimeError | OSError) and any(
        words in text.lower() for words in NO_MEMORY_TO_LOAD
    )


def _find_lost_peer(error: BaseException | None) -> BaseException | None:
    """Returns the error of JAX about a lost process in a chain of causes, if any."""
    while error is not None:
        if type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError") and reports_lost_peer(str(error)):
            return error
        error = error.__cause__
    return None


def lost_worker(error: BaseException) -> str:
    """Returns the message of an error about a lost worker as one line, or ""."""
    if isinstance(error, BrokenProcessPool) or (isinstance(error, RuntimeError) and LOST_WORKER.search(str(error))):
        return " ".join(str(error).split())[:300].rstrip(".")
    return ""


def _file_cause(error: OSError) -> Cause | None:
    reason = error.strerror or type(error).__name__
    where = " -> ".join(
        os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)
    )
    if error.errno in MACHINE_FIXES:
        place = f"{where}: {reason}" if where else reason
        remedy = MACHINE_FIXES[error.errno]
        return Cause(TRY_AGAIN, f"{place}. {remedy}, then start the same command again: a run goes on where it was.")
    if error.errno == errno.ENOENT and not where and _lost_working_directory():
        return Cause(INVALID_INPUT, "The working directory was removed. Change to another (cd), then try again.")
    if error.errno == errno.EFBIG and not where:
        return Cause(INVALID_INPUT, f"{reason}. {PATH_FIXES[errno.EFBIG]}.")
    if error.errno in PATH_FIXES and where:
        return Cause(INVALID_INPUT, f"{where}: {reason}. {PATH_FIXES[error.errno]}.")
    return None


def _lost_working_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _missing_module(error: ModuleNotFoundError) -> Cause | None:
    name = error.name or ""
    if not name or name.split(".")[0] == __name__.split(".")[0]:
        return None
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    by = f", which {frames[-1].filename} line {frames[-1].lineno} imports" if frames else ""
    return Cause(
        INVALID_INPUT,
        f"Missing module {name}{by}. Install it for {sys.executable or 'this Python'}, or put its folder on "
        "PYTHONPATH.",
    )


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200].rstrip('.')}" if lines else type(error).__name__


def report_error(error: BaseException) -> int:
    """Prints an error to stderr, and returns its exit code.

    A UserError, an error with an attribute `exit_code`, and an error with a known cause are printed as a message only,
    or with a traceback if SPMDKIT_TRACEBACK=1. Other errors are unexpected: they are printed with their traceback and a
    request to report them. Control characters are escaped. For a launcher that relays them, lines begin with MARK.
    """
    if isinstance(error, SystemExit):  # as Python itself does
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
            return FAILED
        return error.code or FINISHED
    if isinstance(error, KeyboardInterrupt):
        print("interrupted; the same command goes on from the newest checkpoint, if there is one", file=sys.stderr)
        return TRY_AGAIN
    code, message = _code_and_message(error)
    text = printable("\n".join(map(_cut, message.split("\n"))))
    if code == FAILED or os.environ.get(TRACEBACK_VARIABLE, "0") != "0":
        text = "".join(traceback.format_exception(error)) + text
    is_relayed = all(os.environ.get(name) == value for name, value in RELAYED.items())
    print("\n".join(MARK + line for line in text.split("\n")) if is_relayed else text, file=sys.stderr)
    return code


def _cut(line: str) -> str:
    """Shortens a line in the middle if it is too long."""
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE // 2]} ... {line[-MAX_LINE // 2 :]}"


def _code_and_message(error: BaseException) -> tuple[int, str]:
    """Returns the exit code and the message of an error."""
    lost_peer = _find_lost_peer(error)  # also as the cause of another error
    if lost_peer is not None:
        return TRY_AGAIN, (
            f"error: This process has lost another one of its run: {_first_line(lost_peer)}. The cause is in the log "
            "of the one that ended first; the same command goes on from the newest checkpoint."
        )
    code = getattr(error, "exit_code", None)
    if code is not None:
        return code, f"error: {error}"
    cause = known_cause(error)
    return (cause.exit_code, f"error: {cause.message}") if cause else (FAILED, PLEASE_REPORT)
