"""The files that a run keeps in `run.dir`, and the check of every path that a user chooses for a further file.

A callback or a command that wrote to one of these names would destroy the run: its checkpoints, its log or its config.
"""

import os
import tempfile
from pathlib import Path
from typing import Literal

from ..mesh.errors import UserError

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
"""Everything that a run keeps in its directory, in the order in which it is moved aside: config.yaml goes last."""
BESIDE: dict[str, Kind] = {
    "logs": "folder",
    "owner.json": "file",
    "config.yaml.partial": "file",
    "provenance.json.partial": "file",
    "metrics.jsonl.new": "file",
    "report.html.partial": "file",
    "report.json.partial": "file",
    "guards.json.partial": "file",
    "compilation.json.partial": "file",
    "rollbacks.json.partial": "file",
}
"""Everything else that is written there: logs of processes, the owner, and files that are renamed when complete."""


def own_file(folder: Path, path: Path) -> str | None:
    """Returns the name of the run's own file or directory that a path leads to, or None.

    Args:
        folder: The directory of a run, which need not exist.
        path: Any path; links and `..` are followed.
    """
    try:
        inside = Path(os.path.realpath(path)).relative_to(os.path.realpath(folder))
    except ValueError:
        return None
    first = inside.parts[0] if inside.parts else ""
    own = {**PIECES, **BESIDE}
    of_file = (name for name, kind in own.items() if kind == "file" and first.startswith(f"{name}."))
    return first if first in own else next(of_file, None)


def check_output(folder: Path, path: str, kind: Kind, key: str, allowed: str, *, probe: bool) -> None:
    """Checks, before training, that a callback can write to the path that it was given.

    Args:
        folder: The directory of the run, which need not exist.
        path: The path; a relative one starts from `folder`.
        kind: The kind of what the callback writes there.
        key: The config key, for messages.
        allowed: The default path, which may be one of the run's own names.
        probe: Whether to check the file system too; only the process that will write does.

    Raises:
        UserError: The path leads to one of the run's own files, or nothing can be written there.
    """
    target, given = folder / Path(path).expanduser(), f"{key}={path!r}"
    own = own_file(folder, target)
    if own is not None and own != allowed:
        raise UserError(
            f"{given} leads to {own}, which the run itself keeps in run.dir. Choose another name, such as {allowed}."
        )
    if not probe:
        return
    try:
        os.lstat(target)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise UserError(f"{given} is not a usable path: {reason(error)}. Choose another.") from error
    is_folder = Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(target)) or os.path.isdir(target)
    if (is_folder or os.path.exists(target)) and is_folder != (kind == "folder"):
        found, expected = ("file", "directory") if kind == "folder" else ("directory", "file")
        raise UserError(f"{given}: {target} is a {found}, but a {expected} is written there. Choose another path.")
    existing = next(each for each in (target, *target.parents) if os.path.exists(each))
    try:
        if os.path.isfile(existing):
            existing.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise UserError(f"{given} cannot be written: {existing}: {reason(error)}. Choose another path.") from error


def reason(error: OSError | ValueError) -> str:
    """Returns the text of an error of the file system, without its number and path."""
    return (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
