"""Files for other programs: nothing has the name that was asked for before all of it is written."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ...mesh.errors import UserError

PARTIAL = ".partial"


def check_target(target: Path, *, force: bool) -> None:
    """Looks whether a file or folder can be written.

    Args:
        target: Absolute.
        force: Whether what is there may be replaced.

    Raises:
        UserError: It is there already, or its folder is not.
    """
    if os.path.lexists(target) and not force:
        raise UserError(f"{target} is there already. Choose another name, or give --force to replace it.")
    if not target.parent.is_dir():
        raise UserError(f"There is no folder {target.parent} to write {target.name} into. Make it first.")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Gives a name beside the target to write to, which becomes the target when the block ends well.

    Args:
        target: Absolute; a file or folder that is there is replaced.

    Raises:
        OSError: It cannot be written; nothing is left behind.
    """
    partial = target.with_name(f"{target.name}{PARTIAL}-{os.getpid()}")
    try:
        yield partial
        _sync(partial)
        if target.is_dir() and not target.is_symlink():
            old = target.with_name(f"{target.name}.old-{os.getpid()}")
            target.rename(old)
            partial.rename(target)
            shutil.rmtree(old)
        else:
            partial.replace(target)
    except BaseException as error:
        with suppress(OSError):
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise


def _sync(path: Path) -> None:
    """Makes sure that what was written is on the disk before it gets its name."""
    files: list[Any] = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
