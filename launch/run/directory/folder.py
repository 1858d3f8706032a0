"""The folder of a run: whether it can be used, looked at before anything is computed; and making it."""

import errno
import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ....mesh.errors import UserError
from ....training.ending.exits import TRY_AGAIN
from ....training.run_files import BESIDE, PIECES, Kind, reason

LONGEST = "0" * 120
"""About as long as the path of a file in a checkpoint is, below the folder."""
PROBE_BYTES = 1 << 16
MACHINE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE} | {errno.ENFILE, errno.EMFILE, errno.ETIMEDOUT}
)
"""Errors that no other command mends: the machine's."""


class FolderUnavailable(RuntimeError):
    """The file system of run.dir cannot be written to now; the same command may work when it can."""

    exit_code = TRY_AGAIN


def check_folder(folder: Path) -> None:
    """Looks whether a run can be kept in a folder, which need not exist; leaves nothing behind.

    Args:
        folder: Absolute, `run.dir`.

    Raises:
        UserError: Its name is too long or no UTF-8, a file is in its place or in that of a folder above it, it may not
            be written to, or one of the pieces of a run in it is a folder where a file belongs, or the other way round:
            all.
        FolderUnavailable: The file system is full, read-only or broken.
    """
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"The folder {folder} of run.dir has a name that is no text in UTF-8, under which no checkpoint can be "
            "saved. Set run.dir to another."
        ) from None
    try:
        os.lstat(folder / LONGEST)  # of no use but for its errors: too long a name, a file where a folder should be
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise _unusable(folder, error) from error
    if os.path.lexists(folder) and not folder.exists():
        raise UserError(
            f"The folder {folder} of run.dir cannot be made: it is a link to nothing. Set run.dir to another."
        )
    if folder.exists():
        for name in PIECES:
            if (folder / name).exists() and os.statvfs(folder / name).f_flag & os.ST_RDONLY:
                raise _unusable(folder / name, OSError(errno.EROFS, os.strerror(errno.EROFS)))
        found = [_problem(folder / name, kind) for pieces in (PIECES, BESIDE) for name, kind in pieces.items()]
        problems = [problem for problem in found if problem]
        if problems and _is_read_only(folder):
            raise _unusable(folder, OSError(errno.EROFS, os.strerror(errno.EROFS)))
        if problems:
            raise UserError("\n".join(problems))
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise _unusable(folder, error, existing) from error


def make_folder(folder: Path) -> None:
    """Makes a folder of a run with those above it; it may exist.

    Raises:
        UserError: It cannot be made: a file is in its place, or there is no permission.
        FolderUnavailable: The file system is full, read-only or broken.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from error


def move(paths: Sequence[Path], folder: Path) -> None:
    """Moves files and folders, in order, into a folder that is made for them on the same file system.

    Raises:
        UserError: They cannot be moved there; where that is so from the first, nothing is left changed.
        FolderUnavailable: The file system is full, read-only or broken.
    """
    moved = 0
    try:
        folder.mkdir()
        for path in paths:
            path.rename(folder / path.name)
            moved += 1
    except OSError as error:
        if not moved and folder.is_dir():
            folder.rmdir()
        if error.errno in MACHINE:
            raise _unusable(folder, error) from error
        raise UserError(
            f"{paths[moved]} cannot be moved to {folder}: {reason(error)}. Move it away yourself, or set run.dir to "
            "another folder."
        ) from error


def is_run(folder: Path) -> bool:
    """Tells whether a folder holds any part of a training: a checkpoint, or metrics of a step."""
    checkpoints, metrics = folder / "checkpoints", folder / "metrics.jsonl"
    saved = checkpoints.is_dir() and any(each.name.isdecimal() for each in checkpoints.iterdir())
    return saved or (metrics.is_file() and metrics.stat().st_size > 0)


def _is_read_only(folder: Path) -> bool:
    """Whether the file system of a folder takes no writes at all."""
    try:
        return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def _problem(path: Path, kind: Kind) -> str | None:
    """What is wrong with one piece of a run, where it is there."""
    if not os.path.lexists(path):
        return None
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return f"{path} cannot be used: {reason(error)}. Remove it, or set run.dir to another folder."
    if kind == "file" and path.is_symlink() and path.name != "config.yaml":  # that one is renamed if it is the user's
        return f"{path} is a symbolic link, and a run replaces this file as a whole. Remove it, or set another run.dir."
    if stat.S_ISDIR(mode) if kind == "folder" else stat.S_ISREG(mode):
        needed = os.R_OK | os.W_OK | (os.X_OK if kind == "folder" else 0)
        if os.access(path, needed):
            return None
        return f"{path} may not be read and written. Change its permissions, or set run.dir to another folder."
    found = "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "device or pipe"
    return f"{path} is a {found}; a run keeps a {kind} of that name. Move it away, or set run.dir to another folder."


def _unusable(folder: Path, error: OSError | ValueError, existing: Path | None = None) -> UserError | FolderUnavailable:
    """The error of a folder that cannot be made or written to, by whose fault it is."""
    if isinstance(error, OSError) and error.errno in MACHINE:
        return FolderUnavailable(
            f"The folder {folder} of run.dir cannot be written to: {reason(error)}. Make room or mend the file "
            "system, then start the same command again; or set run.dir to a folder elsewhere."
        )
    if isinstance(error, NotADirectoryError | FileExistsError):
        file = next((each for each in (folder, *folder.parents) if each.is_file()), folder)
        return UserError(
            f"The folder {folder} of run.dir cannot be made: {file} is a file. Set run.dir to another, or move it away."
        )
    what = f"written to: {existing}" if existing == folder else f"made: {existing}" if existing else "made"
    return UserError(f"The folder {folder} of run.dir cannot be {what}: {reason(error)}. Set run.dir to another.")
