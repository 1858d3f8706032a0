"""Checks of the machine and the run directory, before anything is compiled or written."""

import errno
import os
import resource
import tempfile
from contextlib import suppress
from pathlib import Path

import jax

from ..layouts.sizes import format_bytes
from ..mesh.errors import TryAgain, UserError, raise_problems
from ..mesh.known_causes import machine_remedy
from ..training.run_files import BESIDE, PIECES, Kind, reason
from .build_run import Built

LONG_NAME = "0" * 120
"""About as long as the path of a checkpoint's file, below the run directory."""
PROBE_BYTES = 1 << 16
MACHINE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE} | {errno.ENFILE, errno.EMFILE, errno.ETIMEDOUT}
)
"""Errors of the machine, which no other command avoids."""


class DirectoryUnavailable(TryAgain):
    """The file system of run.dir is not writable now; the same command may work later."""


def check_directory(folder: Path) -> None:
    """Checks that a directory, which need not exist, can hold a run; leaves nothing behind.

    Args:
        folder: The absolute path of `run.dir`.

    Raises:
        UserError: Its name is too long or not UTF-8, a file is in its place or in that of a parent, it is not writable,
            or a part of a run in it is of another kind, such as a directory instead of a file (lists all of them).
        DirectoryUnavailable: The file system, or that of a part of the run, is full, read-only or broken.
    """
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"The directory {folder} of run.dir has a name that is not valid UTF-8, so no checkpoint can be saved in "
            "it. Set run.dir to another directory."
        ) from None
    try:
        with suppress(FileNotFoundError):
            os.lstat(folder / LONG_NAME)  # only for its errors: a name that is too long, or a file in the way
        existing = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
        if not existing.exists():
            raise UserError(
                f"The directory {folder} of run.dir cannot be created: {existing} is a broken symbolic link. Set "
                "run.dir to another directory."
            )
        with tempfile.TemporaryFile(dir=existing) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise explain_unusable(folder, error) from error
    found = [_problem(folder / name, kind) for pieces in (PIECES, BESIDE) for name, kind in pieces.items()]
    raise_problems(problem for problem in found if problem)


def _problem(path: Path, kind: Kind) -> str:
    """Returns the problem of one part of a run; "" if it is missing or usable.

    Raises:
        DirectoryUnavailable: Its file system is read-only.
    """
    if not os.path.lexists(path):
        return ""
    if path.is_dir():
        found = "directory"
    elif path.exists():
        found = "file" if path.is_file() else "device or pipe"
        if found == kind == "file" and path.is_symlink():
            return (
                f"{path} is a symbolic link to {os.path.realpath(path)}, a file outside of the run that it would "
                "overwrite; a run keeps a file of that name. Move the link, or set run.dir to another directory."
            )
    else:
        found = "broken symbolic link"
    expected = "directory" if kind == "folder" else "file"
    if found != expected:
        return (
            f"{path} is a {found}; a run keeps a {expected} of that name. Move it, or set run.dir to another directory."
        )
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        raise explain_unusable(path, OSError(errno.EROFS, os.strerror(errno.EROFS)))
    if os.access(path, os.R_OK | os.W_OK | (os.X_OK if kind == "folder" else 0)):
        return ""
    return f"{path} is not readable and writable. Change its permissions, or set run.dir to another directory."


def explain_unusable(folder: Path, error: OSError) -> UserError | DirectoryUnavailable:
    """Returns the error of a directory that cannot be created or written to: the user's or the machine's."""
    if error.errno in MACHINE:
        return DirectoryUnavailable(
            f"The directory {folder} of run.dir is not writable: {reason(error)}. {machine_remedy(error)}, then start "
            "the same command again; or set run.dir to a directory elsewhere."
        )
    if isinstance(error, NotADirectoryError | FileExistsError):
        file = next((each for each in (folder, *folder.parents) if each.is_file()), folder)
        return UserError(
            f"The directory {folder} of run.dir cannot be created: {file} is a file. Set run.dir to another directory, "
            "or move the file."
        )
    what = "written to" if os.path.isdir(folder) else "created"
    return UserError(
        f"The directory {folder} of run.dir cannot be {what}: {reason(error)}. Set run.dir to another directory."
    )


def check_memory(built: Built) -> None:
    """Checks, before compilation, that this process can hold its part of the parameters and the optimizer's state.

    Activations, gradients and copies come in addition, so a run that passes may still run out of memory.

    Raises:
        UserError: It cannot.
    """
    tables = (built.layouts.table, built.step.optimizer_table, built.step.extra_table)
    each = sum(table.bytes_per_device for table in tables)
    devices = jax.local_devices()
    limit, holder = _available_memory(devices)
    together = len(devices) if devices[0].platform == "cpu" else 1
    if limit is None or each * together <= limit:
        return
    arithmetic = f", {together} x {format_bytes(each)} = {format_bytes(each * together)}" if together > 1 else ""
    raise UserError(
        f"The state of this run does not fit: parameters and optimizer take {format_bytes(each)} on each device"
        f"{arithmetic}, and {holder} {format_bytes(limit)}. Make the model smaller (model.width, model.layers), split "
        "its state over more devices (strategy.fsdp), or use an optimizer with a smaller state (adafactor, sgd)."
    )


def _available_memory(devices: list) -> tuple[int | None, str]:
    """Returns the available bytes, or None if unknown, and their holder."""
    if devices[0].platform != "cpu":
        return (devices[0].memory_stats() or {}).get("bytes_limit"), "a device has"
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine has"
    process = resource.getrlimit(resource.RLIMIT_AS)[0], "ulimit -v allows"  # -1 = no limit
    return min(machine, process) if process[0] > 0 else machine
