"""Errors of checkpoints: damaged files, a machine that cannot read them, or a checkpoint of another run.

A checkpoint is reported as damaged only if its bytes were read and are wrong, or if one of its files is missing. A
missing permission, no memory, a failing file system, or a path or format that a reader rejects say nothing about the
files: such a checkpoint may be intact, and no message suggests to remove it.
"""

import asyncio
import errno
import logging
import os
import re
import traceback
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from orbax.checkpoint._src import asyncio_utils

from ..layouts.sizes import counted
from ..mesh.errors import TryAgain, UserError, first_lines
from ..mesh.known_causes import TRACEBACK_VARIABLE, is_out_of_memory, lacks_memory, machine_remedy

NOT_DAMAGE = frozenset(
    (errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
)
"""Error numbers of the system after which the same command may work later."""
MISSING = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EISDIR))
"""Error numbers of the system for a missing file."""
WRONG_BYTES = re.compile(r"DATA_LOSS|OUT_OF_RANGE|NOT_FOUND|FAILED_PRECONDITION|CRC|Error decoding|Invalid JSON")
"""Texts of TensorStore's errors about the contents of files; an error about a path or an option has none of them."""
MAX_LISTED = 20
"""Problems listed in one message."""


class CheckpointError(UserError):
    """A checkpoint is missing or damaged, or it does not fit the state of this run."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint differs from what was saved: files are missing or cut, or an array has other bits."""


class CheckpointUnavailable(TryAgain):
    """The machine or the file system cannot read a checkpoint now; nothing shows that it is damaged."""


class SaveFailed(TryAgain):
    """A checkpoint could not be written; the ones before it are intact."""


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Raises the error that `explain` returns for an error of the block, which reads a checkpoint."""
    try:
        yield
    except Exception as error:
        explained = explain(folder, error)
        if explained is error:
            raise
        raise explained from error


def explain(folder: Path, error: Exception) -> Exception:
    """Classifies an error of reading a checkpoint.

    Args:
        folder: The checkpoint.
        error: An error of Python, Orbax or TensorStore.

    Returns:
        DamagedCheckpoint, CheckpointUnavailable, CheckpointError if it cannot be opened for another reason, or the
        error itself if memory ran out, which `known_causes` explains.
    """
    if is_out_of_memory(error) or isinstance(error, CheckpointError | CheckpointUnavailable):
        return error
    while isinstance(error.__cause__, Exception):  # Orbax wraps what TensorStore raises
        error = error.__cause__
    number = error_number(error)
    if number in NOT_DAMAGE or lacks_memory(error):
        remedy = "repair its permissions or the file system"
        if lacks_memory(error) or number in (errno.EMFILE, errno.ENFILE):
            remedy = _remedy(number, error)
        return CheckpointUnavailable(
            f"The checkpoint {folder} cannot be read now: {reason(error)}. It may be intact: leave it there, {remedy}, "
            "and start the same command again."
        )
    if number in MISSING or (number is None and WRONG_BYTES.search(str(error))):
        return DamagedCheckpoint(f"The checkpoint {folder} is damaged: {reason(error)}.")
    return CheckpointError(
        f"The checkpoint {folder} cannot be opened: {reason(error)}. Nothing shows that it is damaged: keep it. Check "
        "its path and the file system, and open it with the versions of orbax-checkpoint and tensorstore that saved it."
    )


def _remedy(number: int | None, error: Exception) -> str:
    """Returns the fix for an error of memory or of too many open files, for the middle of a sentence."""
    system = OSError(number, os.strerror(number)) if number else error
    remedy = machine_remedy(system)
    return remedy[:1].lower() + remedy[1:]


def error_number(error: BaseException) -> int | None:
    """Returns the system's number of an error; TensorStore puts it into its text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = re.search(r"(?:OS error |os_error_code=')(\d+)", str(error))
    return int(found[1]) if found else None


def reason(error: Exception) -> str:
    """Returns an error in one line, the system's own words first, without the settings that TensorStore repeats."""
    text = " ".join(str(error).partition("[tensorstore_spec=")[0].split())
    text = f"{type(error).__name__}: {text}".rstrip(".")
    number = error_number(error)
    system = f"{os.strerror(number)}: " if number and not isinstance(error, OSError) else ""
    return f"{system}{text}" if len(text) <= 400 else f"{system}{text[:400]} ..."


def differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Compares the arrays of a checkpoint with those that are to be restored.

    Args:
        wanted: Path -> a shape and a dtype, of the run.
        found: Path -> a shape and a dtype, of the checkpoint.

    Returns:
        A line for each array that is missing, extra, or of another shape or dtype.
    """
    missing = [f"{path}: not in the checkpoint" for path in wanted if path not in found]
    extra = [f"{path}: only in the checkpoint" for path in found if path not in wanted]
    changed = [
        f"{path}: {kind(found[path])} in the checkpoint, {kind(wanted[path])} in this run"
        for path in wanted
        if path in found and kind(found[path]) != kind(wanted[path])
    ]
    return missing + extra + changed


def mismatch(begin: str, problems: Sequence[str], advice: str) -> CheckpointError:
    """Returns the error of a checkpoint that does not fit.

    Args:
        begin: The begin of the message, up to the number of arrays.
        problems: A line for each array, at least one.
        advice: What to change.
    """
    first = f"{begin}, in {counted(len(problems), 'array')}:"
    return CheckpointError("\n  ".join([first, *first_lines(problems, MAX_LISTED)]) + f"\n{advice}")


def kind(array: Any) -> str:
    """Returns dtype and shape in one word, such as "float32[3, 16]"."""
    return f"{np.dtype(array.dtype)}{list(array.shape)}"


def _full_text(record: logging.LogRecord) -> str:
    """Returns a message with its traceback; a future's message does not name the file that failed."""
    return record.getMessage() + "".join(traceback.format_exception(record.exc_info[1]) if record.exc_info else ())


@cache
def leave_errors_to_one_message() -> None:
    """Suppresses what Orbax prints of a failure before our own message, and makes it wait for what is in progress.

    If one of several reads or writes of a thread fails, Orbax closes the thread's event loop. The others would go on in
    TensorStore: a write creates the directory of a failed save again after it was removed, and each finds the loop
    closed, which Python prints with a traceback.
    """
    run_sync = asyncio_utils.run_sync
    asyncio_utils.run_sync = lambda work, **options: run_sync(_with_other_tasks(work), **options)
    if os.environ.get(TRACEBACK_VARIABLE, "0") != "0":
        return
    logging.getLogger("absl").addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname)
    # If several tasks fail, asyncio logs that the errors of all but one were never retrieved.
    logging.getLogger("asyncio").addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in _full_text(record))


async def _with_other_tasks(work: Coroutine[Any, Any, Any]) -> Any:
    """Awaits `work`, and if it raises, the other tasks of its event loop."""
    try:
        return await work
    except Exception:
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
        raise
