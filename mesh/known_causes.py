"""Reports errors on stderr with their exit codes; explains known errors of Python, JAX and the machine."""

import errno
import os
import re
import sys
import traceback
from concurrent.futures.process import BrokenProcessPool

import jax

from .errors import first_line, printable
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
UNHEALTHY = re.compile(r"stopped sending heartbeats\):((?:[\s,]*(?:/job:\w+(?:/replica:\d+)?/task:)?\d+(?=[\s,]|$))*)")

UNANSWERED_HEARTBEAT = re.compile(r"DEADLINE_EXCEEDED[^\n]*\s+RPC: /xla\.coordination\.CoordinationService/Heartbeat")


def reports_lost_peer(text: str) -> bool:
    """Returns True if the output or error message of a process reports that it lost another process."""
    return LOST.search(text) is not None


def ranks_without_heartbeat(text: str) -> list[int]:
    """Returns the ranks without heartbeats that JAX's coordination service lists in the output of a process."""
    found = UNHEALTHY.search(text)
    return [int(rank) for rank in re.findall(r"\d+(?=[\s,]|$)", found[1])] if found else []


def reports_silent_coordinator(text: str) -> bool:
    """Returns True if a process ended because rank 0 did not answer its heartbeats, though nothing refused them."""
    return UNANSWERED_HEARTBEAT.search(text) is not None


MACHINE_ERRORS = {"ENOSPC", "EDQUOT", "EIO", "EROFS", "ESTALE", "ENOMEM", "EMFILE", "ENFILE", "EADDRINUSE", "ETIMEDOUT"}
MACHINE_ERRORS |= {"ENOTCONN", "EHOSTDOWN", "EHOSTUNREACH", "EREMOTEIO", "ENOLCK", "EBUSY", "EAGAIN"}
"""Errors of the machine, not of a path that the user gave; the same command can work later."""
PATH_ERRORS = {"EACCES", "EPERM", "ENOENT", "EEXIST", "ENOTDIR", "EISDIR", "ENOTEMPTY", "ENAMETOOLONG", "ELOOP"}
"""Errors of a path that the user gave."""
MEMORY_REMEDY = (
    "Lower train.global_batch, data.length or the sizes of the model, raise train.accumulate, set train.remat to full, "
    "or split over more devices (strategy.fsdp); `spmdkit explain` shows what each device holds. On the CPU, close "
    "other programs, or raise the limit (ulimit -v)."
)
XLA_OUT_OF_MEMORY = re.compile("RESOURCE_EXHAUSTED|out of memory", re.IGNORECASE)
NO_MEMORY_TO_LOAD = re.compile("cannot allocate memory|failed to map segment|can't start new thread", re.IGNORECASE)
"""In messages of the loader and of threads."""
MEMORY_OF_SYSTEM = re.compile(
    r"OS error 12\b|os_error_code='12'|RESOURCE_EXHAUSTED|cannot allocate memory", re.IGNORECASE
)
"""In messages of TensorStore and Orbax."""
LOST_WORKER = re.compile(
    r"DataLoader worker \(pid|DataLoader timed out|worker process.* (terminated|killed|died)", re.IGNORECASE
)
"""In messages of PyTorch and Grain about a killed or late worker."""
WORKER_REMEDY = (
    "Most are killed for lack of memory: use fewer workers or smaller batches, or, if the message mentions shared "
    "memory, increase /dev/shm. The same command resumes from the latest checkpoint."
)


def known_cause(error: BaseException) -> tuple[int, str] | None:
    """Returns the exit code and the cause, with the fix, of an error that is not spmdkit's own; None = unexpected."""
    if is_out_of_memory(error):
        return TRY_AGAIN, f"There is not enough memory: {first_line(error)}. {MEMORY_REMEDY}"
    if isinstance(error, RuntimeError) and (message := lost_worker(error)):
        return TRY_AGAIN, f"A loader has lost a worker process: {message}. {WORKER_REMEDY}"
    if isinstance(error, ModuleNotFoundError):
        return _missing_module(error)
    return _file_cause(error) if isinstance(error, OSError) else None


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if Python, NumPy, XLA or the system ran out of memory."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return XLA_OUT_OF_MEMORY.search(str(error)) is not None
    may_be = isinstance(error, ImportError | OSError | RuntimeError)
    return isinstance(error, MemoryError) or (may_be and NO_MEMORY_TO_LOAD.search(str(error)) is not None)


def lacks_memory(error: BaseException) -> bool:
    """Returns True if an error, or one of those that it was raised from, says that memory ran out."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        text = str(current)
        if is_out_of_memory(current) or "bad_alloc" in text or MEMORY_OF_SYSTEM.search(text):
            return True
        current = current.__cause__ or current.__context__
    return False


def machine_remedy(error: BaseException) -> str:
    """Returns the fix for an error of the machine while files are written, without a full stop."""
    if lacks_memory(error):
        return "Raise the limit of memory (ulimit -v, or that of the job), or close other programs"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "Raise the limit of open files (ulimit -n)"
    return "Free space or repair the file system"


def _find_lost_peer(error: BaseException | None) -> BaseException | None:
    """Returns the error of JAX about a lost process in a chain of causes, if any."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError) and reports_lost_peer(str(error)):
            return error
        error = error.__cause__
    return None


def lost_worker(error: BaseException) -> str:
    """Returns the message of an error about a lost worker as one line, or ""."""
    if isinstance(error, BrokenProcessPool) or (isinstance(error, RuntimeError) and LOST_WORKER.search(str(error))):
        return " ".join(str(error).split())[:300].rstrip(".")
    return ""


def _file_cause(error: OSError) -> tuple[int, str] | None:
    reason = error.strerror or type(error).__name__
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    place = ": ".join([*([" -> ".join(names)] if names else []), reason])
    name = errno.errorcode.get(error.errno or 0)
    if name in MACHINE_ERRORS:
        fix = "Correct this on the machine, then start the same command again: a run goes on where it was."
        return TRY_AGAIN, f"{place}. {fix}"
    if error.errno == errno.EFBIG:
        return INVALID_INPUT, f"{place}. The file would be larger than allowed (ulimit -f)."
    if names and name in PATH_ERRORS:
        return INVALID_INPUT, f"{place}. Correct the path or its permissions, or give another."
    if not names and error.errno == errno.ENOENT and _lost_working_directory():
        return INVALID_INPUT, "The working directory was removed. Change to another (cd), then try again."
    return None


def _lost_working_directory() -> bool:
    try:
        os.getcwd()
    except OSError:
        return True
    return False


def _missing_module(error: ModuleNotFoundError) -> tuple[int, str] | None:
    name = error.name or ""
    if not name or name.split(".")[0] == __name__.split(".")[0]:
        return None
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    by = f", which {frames[-1].filename} line {frames[-1].lineno} imports" if frames else ""
    fix = f"Install it for {sys.executable}, or put its directory on PYTHONPATH."
    return INVALID_INPUT, f"Missing module {name}{by}. {fix}"


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
            f"error: This process has lost another one of its run: {first_line(lost_peer)}. The cause is in the log "
            "of the one that ended first; the same command goes on from the newest checkpoint."
        )
    code = getattr(error, "exit_code", None)
    if code is not None:
        return code, f"error: {error}"
    cause = known_cause(error)
    return (cause[0], f"error: {cause[1]}") if cause else (FAILED, PLEASE_REPORT)
