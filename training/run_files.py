"""The files that a run keeps in `run.dir`, and the check of paths that a user chooses for other files.

A callback or a command that writes to one of these names would destroy the checkpoints, the log or the config.
"""

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Literal

from ..mesh.errors import UserError
from ..mesh.files import PARTIAL

Kind = Literal["file", "folder"]
PIECES: dict[str, Kind] = {
    "checkpoints": "folder",
    "metrics.jsonl": "file",
    "report.html": "file",
    "report.json": "file",
    "goodput.jsonl": "file",
    "guards.json": "file",
    "rollbacks.json": "file",
    "best.json": "file",
    "metrics.csv": "file",
    "samples.jsonl": "file",
    "tensorboard": "folder",
    "wandb": "folder",
    "mlruns": "folder",
    "profile": "folder",
    "compilation.json": "file",
    "provenance.json": "file",
    "config.yaml": "file",
}
"""The files and directories of a run, in the order in which they are moved aside: config.yaml is the last."""
BESIDE: dict[str, Kind] = {
    "logs": "folder",
    "owner.json": "file",
    "owner.json.lock": "file",
    **{f"{name}{PARTIAL}": "file" for name, kind in PIECES.items() if kind == "file"},
}
"""Other files in the directory: logs of processes, the owner, and files that are renamed when complete."""


def own_file(folder: Path, path: Path) -> str | None:
    """Returns the name of the run's own file or directory that a path leads to, or None.

    Args:
        folder: The run directory, which may be missing.
        path: Any path; links and `..` are followed.
    """
    try:
        inside = Path(os.path.realpath(path)).relative_to(os.path.realpath(folder))
    except ValueError:
        return None
    first = inside.parts[0] if inside.parts else ""
    own = {**PIECES, **BESIDE}
    derived = (name for name, kind in own.items() if kind == "file" and first.startswith(f"{name}."))
    return first if first in own else next(derived, None)


def check_output(folder: Path, path: str, kind: Kind, key: str, allowed: str, *, probe: bool) -> None:
    """Checks, before training, that a callback can write to its path.

    Args:
        folder: The run directory, which may be missing.
        path: The path; a relative path is relative to `folder`.
        kind: The kind of the output.
        key: The config key, for messages.
        allowed: The default path, which may be one of the run's own names.
        probe: Also checks the file system; only the process that writes does so.

    Raises:
        UserError: The path leads to one of the run's own files, or cannot be written.
    """
    target, given = folder / Path(path).expanduser(), f"{key}={path!r}"
    own = own_file(folder, target)
    if own is not None and own != allowed:
        raise UserError(f"{given} leads to {own}, which the run keeps in run.dir. Choose another, such as {allowed}.")
    if not probe:
        return
    try:
        with suppress(FileNotFoundError):
            os.lstat(target)
        is_folder = target.is_dir() or Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(target))
        if (is_folder or target.exists()) and is_folder != (kind == "folder"):
            found, expected = ("file", "directory") if kind == "folder" else ("directory", "file")
            raise UserError(f"{given}: {target} is a {found}, but a {expected} is written there. Choose another path.")
        existing = next(each for each in (target, *target.parents) if each.exists())
        with existing.open("ab") if existing.is_file() else tempfile.TemporaryFile(dir=existing):
            pass
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"{given} cannot be written: {reason(error)}. Choose another path.") from error


def reason(error: OSError | ValueError) -> str:
    """Returns the text of a file system error, without its number and path."""
    return (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
