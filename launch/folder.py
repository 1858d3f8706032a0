"""Making the folders that a config names."""

from pathlib import Path

from ..mesh.errors import UserError


def make_folder(folder: Path) -> None:
    """Makes a folder of a run with those above it; it may exist.

    Raises:
        UserError: It cannot be made: a file is in its place, or there is no permission.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"The folder {folder} of run.dir cannot be made: {reason}. Set run.dir to another.") from error
