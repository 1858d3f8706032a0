"""Paths on file systems, which are never URLs; absolute paths; and files that are replaced as a whole."""

import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import UserError

PARTIAL = ".partial"
"""Suffix of a file or directory that is being written; it is renamed when it is complete."""


URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/|hf:")
"""The beginning of a URL: gs://bucket, hf:owner/name, and s3:/bucket, which `Path` makes of s3://bucket."""
LOCAL = "a path on a mounted file system (URLs are not supported: mount the bucket, or copy the files)"
"""The rule for every path."""


def is_url(path: str | Path) -> bool:
    """Returns True for a URL, which `Path` would take for a directory named `gs:` below the working directory."""
    return URL.match(str(path)) is not None


def check_local(path: str | Path, name: str) -> None:
    """Checks that a path is not a URL.

    Args:
        path: The path, as the user gave it.
        name: The key or argument, for the message.

    Raises:
        UserError: It is a URL.
    """
    if is_url(path):
        raise UserError(f"{name} must be {LOCAL}, got {str(path)!r}.")


def below_root(path: str, root: str | Path) -> str:
    """Returns a path or glob relative to a root, with `~` expanded; a URL stays as it is.

    Args:
        path: An absolute or relative path.
        root: The directory that relative paths start from; empty = the working directory.
    """
    return path if is_url(path) else os.path.join(root, os.path.expanduser(path))


def absolute_path(path: str | Path) -> Path:
    """Returns a path as an absolute path without `..`, which readers such as TensorStore's reject.

    Everything up to the last `..` is resolved as the file system resolves it, including symbolic links; links after it
    keep their names, so that `check_replaceable` finds them.

    Args:
        path: Relative to the working directory, or absolute.

    Raises:
        UserError: It is a URL.
        OSError: The working directory no longer exists.
    """
    check_local(path, "The path")
    parts = Path(path).absolute().parts
    if ".." not in parts:
        return Path(*parts)
    after = len(parts) - parts[::-1].index("..")
    return Path(os.path.realpath(Path(*parts[:after])), *parts[after:])


@contextmanager
def atomic_write(target: Path) -> Iterator[Path]:
    """Provides a temporary path in the directory of `target`, and renames it to `target` if the block succeeds.

    The block creates a file or a directory at the temporary path. Its contents are flushed to the disk before the
    rename, so that `target` is complete whenever it exists. A regular file is replaced by a file, and a directory by a
    directory; the caller decides beforehand if what exists may be replaced.

    Args:
        target: The path to write.

    Raises:
        UserError: The target is a symbolic link, a device, or otherwise not a regular file or directory.
        OSError: It cannot be written. The target is unchanged, and no temporary file remains.
    """
    check_replaceable(target)
    partial = target.with_name(f"{target.name}{PARTIAL}")
    _remove(partial)  # left by a process that was killed
    try:
        yield partial
        for file in [*partial.rglob("*")] if partial.is_dir() else [partial]:
            if file.is_file():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        check_replaceable(target)
        if target.is_dir() and partial.is_dir():
            old = target.with_name(f"{target.name}.old{PARTIAL}")
            _remove(old)
            target.rename(old)
            partial.rename(target)
            _remove(old)
        else:
            partial.replace(target)
    except BaseException as error:
        with suppress(OSError):
            _remove(partial)
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(partial)):
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise


def write_text(target: Path, text: str, *, mode: int | None = None) -> None:
    """Replaces a file as a whole with a text in UTF-8; see `atomic_write`.

    Args:
        target: The file.
        text: What it then contains; characters that UTF-8 cannot encode become "?".
        mode: The permissions of the file, such as 0o600; None for the default of this process.
    """
    with atomic_write(target) as partial:
        if mode is not None:
            partial.touch(mode)
        partial.write_bytes(text.encode("utf-8", "replace"))


def check_replaceable(target: Path) -> None:
    """Checks that a path is free, a regular file, or a directory.

    Raises:
        UserError: It is a symbolic link, which a rename would replace, a device, a pipe, or a socket.
    """
    try:
        mode = os.lstat(target).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "a device, a pipe, or a socket"
        remedy = f" Give the path that it refers to ({os.path.realpath(target)}), or" if stat.S_ISLNK(mode) else ""
        raise UserError(
            f"{target} is {kind}, and only a regular file can be replaced by a complete new one."
            f"{remedy or ' Give'} another name."
        )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
