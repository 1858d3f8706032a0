"""Errors of checkpoints: damaged files, a machine that cannot read them, or a checkpoint of another run.

A checkpoint is reported as damaged only if its bytes were read and are wrong, or if one of its files is missing. A
missing permission, no memory, a failing file system, or a path or format that a reader rejects say nothing about the
files: such a checkpoint may be intact, and no message suggests to remove it.
"""

import errno
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ...layouts.sizes import counted, format_bytes
from ...mesh.errors import UserError
from ..ending.exits import TRY_AGAIN
from ..ending.known_causes import is_out_of_memory
from .folder import DESCRIPTION, STATE, contents

NOT_DAMAGE = frozenset(
    (errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
)
"""Errors of the system after which the same command may work later."""
MISSING = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EISDIR))
"""Errors of the system for a file that is not there."""
WRONG_BYTES = re.compile(r"DATA_LOSS|OUT_OF_RANGE|NOT_FOUND|FAILED_PRECONDITION|CRC|Error decoding|Invalid JSON")
"""Texts of TensorStore's errors about the contents of files; an error about a path or an option has none of them."""
MAX_LISTED = 20
"""Problems listed in one message."""


class CheckpointError(UserError):
    """There is no checkpoint to restore, it is damaged, or it does not fit the state of this run."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is not what was saved: files are missing or cut, or an array has other bits."""


class CheckpointUnavailable(RuntimeError):
    """The machine or the file system does not let a checkpoint be read; nothing says that it is damaged."""

    exit_code = TRY_AGAIN


class SaveFailed(RuntimeError):
    """A checkpoint could not be written; the ones before it are whole."""

    exit_code = TRY_AGAIN


def unreadable(folder: Path, error: Exception) -> Exception:
    """Says what an error that came while a checkpoint was read means.

    Args:
        folder: Of the checkpoint.
        error: Of Python, Orbax or TensorStore.

    Returns:
        DamagedCheckpoint, CheckpointUnavailable, CheckpointError if it cannot be opened for another reason, or the
        error itself if there was no memory, which `known_causes` explains.
    """
    if is_out_of_memory(error) or isinstance(error, CheckpointError | CheckpointUnavailable):
        return error
    while isinstance(error.__cause__, Exception):  # Orbax wraps what TensorStore raises
        error = error.__cause__
    number = error_number(error)
    if number in NOT_DAMAGE:
        return CheckpointUnavailable(
            f"The checkpoint {folder} cannot be read now: {reason(error)}. It may well be whole: leave it "
            "there, mend its permissions or the file system, and start the same command again."
        )
    if number in MISSING or (number is None and _shows_damage(folder, error)):
        return DamagedCheckpoint(f"The checkpoint {folder} is damaged: {reason(error)}.")
    return CheckpointError(
        f"The checkpoint {folder} cannot be opened: {reason(error)}. Nothing shows that it is damaged: keep it. Check "
        "its path and the file system, and open it with the versions of orbax-checkpoint and tensorstore that saved it."
    )


def _shows_damage(folder: Path, error: Exception) -> bool:
    """Checks if an error that is not the system's comes from wrong bytes in the files."""
    if WRONG_BYTES.search(str(error)):
        return True
    unparsable = isinstance(error, KeyError | TypeError | AttributeError | IndexError | NotImplementedError)
    unparsable = unparsable or (isinstance(error, ValueError) and "tensorstore_spec" not in str(error))
    is_described = (folder / STATE / DESCRIPTION).exists()  # then every byte of the description was found to be right
    return unparsable and not is_described and "Error parsing" not in str(error)


def other_bits(folder: Path, paths: list[str], among: int) -> str:
    """What is said of a checkpoint whose arrays are not what was saved.

    Args:
        folder: Of the checkpoint.
        paths: Of the arrays whose checksums differ, at least one.
        among: How many arrays there are.
    """
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return (
        f"The checkpoint {folder} is damaged: {', '.join(paths[:3])}{more} of {among} arrays read as other bits than "
        "were saved (their checksums differ)."
    )


def error_number(error: BaseException) -> int | None:
    """The system's number of an error, which TensorStore puts into its text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = re.search(r"(?:OS error |os_error_code=')(\d+)", str(error))
    return int(found[1]) if found else None


def reason(error: Exception) -> str:
    """An error in one line, what the system says first; without what TensorStore repeats of its settings."""
    text = " ".join(str(error).partition("[tensorstore_spec=")[0].split())
    text = f"{type(error).__name__}: {text}".rstrip(".")
    number = error_number(error)
    system = f"{os.strerror(number)}: " if number and not isinstance(error, OSError) else ""
    return f"{system}{text}" if len(text) <= 400 else f"{system}{text[:400]} ..."


def differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """What keeps a checkpoint from being restored as a state: arrays that are missing, too many, or of another kind.

    Args:
        wanted: Path -> something with a shape and a dtype, of the run.
        found: The same of the checkpoint.

    Returns:
        A line for each array.
    """
    missing = [f"{path}: not in the checkpoint" for path in wanted if path not in found]
    extra = [f"{path}: only in the checkpoint" for path in found if path not in wanted]
    changed = [
        f"{path}: {kind(found[path])} in the checkpoint, {kind(wanted[path])} in this run"
        for path in wanted
        if path in found and kind(found[path]) != kind(wanted[path])
    ]
    return missing + extra + changed


def mismatch(folder: Path, problems: list[str]) -> CheckpointError:
    """The error of a checkpoint that does not fit.

    Args:
        folder: Of the checkpoint.
        problems: From `differences`, at least one.
    """
    left_out = len(problems) - MAX_LISTED
    listed = problems[:MAX_LISTED] + ([f"... and {left_out} more"] if left_out > 0 else [])
    return CheckpointError(
        f"The checkpoint {folder} does not fit the state of this run, in {counted(len(problems), 'array')}:\n  "
        + "\n  ".join(listed)
        + "\nSet model, optimizer, precision.params, precision.compute, precision.loss_scale and callbacks that change "
        "the learning rate back to what wrote it, or train into another run.dir. strategy.data as well, if it has "
        "local_steps or compress: its groups keep arrays of their own."
    )


def save_failed(directory: Path, step: int | None, error: Exception, wanted: int) -> SaveFailed:
    """The error of a checkpoint that could not be written, with what is complete, and the room.

    Args:
        directory: The folder of checkpoints.
        step: Of the checkpoint.
        error: Of Python, Orbax or TensorStore.
        wanted: Bytes that a checkpoint takes, at most.
    """
    there = "What is complete there cannot be seen now."
    with suppress(OSError):
        free = format_bytes(shutil.disk_usage(directory).free)
        room = f"a checkpoint takes up to {format_bytes(wanted)}, and {free} are free"
        there = f"Complete there: {list(contents(directory).steps) or 'none'}; {room}."
    return SaveFailed(
        f"Checkpoint of step {step} could not be written to {directory}: {reason(error)}. {there} Make room or repair "
        "the file system, then start the same command again: it resumes from the newest complete checkpoint."
    )


def kind(array: Any) -> str:
    """Dtype and shape in one word, such as "float32[3, 16]"."""
    return f"{np.dtype(array.dtype)}{list(array.shape)}"
