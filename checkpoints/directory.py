"""The directory of a run's checkpoints, and the arguments of the command line that name one.

40                              complete: it was renamed when every process had written its part
60.orbax-checkpoint-tmp         unfinished: ignored, and removed by the next save
damaged-20, damaged-20-2        set aside because it could not be restored; never restored or counted
removed-10                      being removed when the process was killed

runs/one                        a run: its directory of checkpoints
runs/one/checkpoints            that directory itself
runs/one/checkpoints/40         one checkpoint; runs/one/40 is the same
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

from ..mesh.errors import UserError
from ..mesh.files import absolute_path
from .damage import CheckpointError

UNFINISHED = ".orbax-checkpoint-tmp"
"""Part of the name of a checkpoint that is being written."""
REMOVED = "removed-"
"""Prefix of a checkpoint that is being removed: it is renamed first, so that a kill leaves no partial checkpoint."""
DAMAGED = "damaged-"
"""Prefix of a checkpoint that could not be restored."""
STATE = "state"
"""Directory of a checkpoint that contains its arrays."""
DESCRIPTION = "description.json"
"""File of a checkpoint with its notes, the checksums of its arrays, and those of the files that describe them."""


class Contents(NamedTuple):
    """The contents of a directory of checkpoints.

    Attributes:
        steps: The steps of complete checkpoints, in order.
        damaged: Names of checkpoints that were set aside.
        unfinished: Names of checkpoints that were never completed.
        leaving: Names of checkpoints with an interrupted removal.
    """

    steps: tuple[int, ...]
    damaged: tuple[str, ...]
    unfinished: tuple[str, ...]
    leaving: tuple[str, ...]

    @property
    def besides(self) -> str:
        """A sentence that lists everything but the complete checkpoints, or ""."""
        names = [*self.damaged, *self.unfinished, *self.leaving]
        return f" Besides: {', '.join(names)}." if names else ""


def contents(directory: Path) -> Contents:
    """Lists a directory of checkpoints; a missing directory is empty.

    Raises:
        OSError: It cannot be listed.
    """
    names = sorted(each.name for each in directory.iterdir() if each.is_dir()) if directory.is_dir() else []
    return Contents(
        tuple(sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)),
        damaged=tuple(name for name in names if name.startswith(DAMAGED)),
        unfinished=tuple(name for name in names if UNFINISHED in name),
        leaving=tuple(name for name in names if name.startswith(REMOVED)),
    )


def set_aside(directory: Path, names: Iterable[str], prefix: str) -> list[Path]:
    """Renames checkpoints within their directory, so that they are no longer restored or counted.

    Args:
        directory: The directory of checkpoints.
        names: The names of the checkpoints.
        prefix: The prefix of their new names: DAMAGED or REMOVED.

    Returns:
        Their new paths.
    """
    moved = []
    for name in names:
        first = directory / f"{prefix}{name}"
        numbered = (first.with_name(f"{first.name}-{number}") for number in count(2))
        target = next(each for each in chain([first], numbered) if not os.path.lexists(each))
        (directory / name).rename(target)
        moved.append(target)
    return moved


def size_on_disk(folder: Path) -> int:
    """Sums the bytes of all files below a directory; files that are removed meanwhile do not count."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(path, name)).st_size
    return total


class Found(NamedTuple):
    """The checkpoints that an argument names.

    Attributes:
        checkpoints: The directory of checkpoints.
        contents: Its contents.
        chosen: The directory of one checkpoint, if the argument or `--step` names one.
    """

    checkpoints: Path
    contents: Contents
    chosen: Path | None

    @property
    def run(self) -> Path:
        """The directory of the run."""
        return self.checkpoints.parent

    @property
    def one(self) -> Path:
        """The directory of one checkpoint: the one that was named, or the latest.

        Raises:
            CheckpointError: The run has none.
        """
        if self.chosen is not None:
            return self.chosen
        if not self.contents.steps:
            raise CheckpointError(f"No complete checkpoint in {self.checkpoints}.{self.contents.besides}")
        return self.checkpoints / str(self.contents.steps[-1])


def find(given: str, step: int | None = None) -> Found:
    """Finds the checkpoints that an argument names.

    Args:
        given: A path, as in the examples above.
        step: The step of one checkpoint, from `--step`.

    Raises:
        UserError: The name is empty; CheckpointError if the directory is missing, it is not a run, or the checkpoint is
            missing.
        OSError: The file system cannot be read.
    """
    refuse_empty(given)
    path = absolute_path(given)
    if not path.exists():
        inside = path.parent / "checkpoints" / path.name
        if not (_is_checkpoint_name(path.name) and inside.is_dir()):
            raise CheckpointError(f"There is no {path}. Give the directory of a run (run.dir), or of a checkpoint.")
        path = inside
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file. Give the directory of a run (run.dir), or of a checkpoint.")
    if _is_checkpoint_name(path.name) and not (path / "checkpoints").is_dir():
        if step is not None:
            raise UserError(f"--step {step}: {path} is one checkpoint already. Omit one of the two.")
        if UNFINISHED in path.name:
            raise CheckpointError(
                f"The checkpoint {path} is unfinished: its save never ended, and the run does not use it. Use the one "
                "before; the next save of the run removes this one."
            )
        return Found(path.parent, contents(path.parent), path)
    checkpoints = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    held = contents(checkpoints)
    if checkpoints is path and not any(held) and (path / "config.yaml").is_file():
        raise CheckpointError(
            f"{path} holds a run that has saved no checkpoint yet. Wait for its first (checkpoint.every steps), or "
            "give another run."
        )
    if checkpoints is path and not any(held) and path.name != "checkpoints":
        raise CheckpointError(
            f"{path} is neither a run nor a directory of checkpoints: it contains neither checkpoints/ nor a directory "
            "with the name of a step. Give the directory of a run (run.dir)."
        )
    return Found(checkpoints, held, None if step is None else _of_step(checkpoints, held, step))


def refuse_empty(given: str | Path) -> None:
    """Rejects the empty name, as of a variable that is not set: to Path it is the working directory.

    Raises:
        UserError: It is given.
    """
    if given == "":
        raise UserError("The name of a run is empty. Give its directory (run.dir), or a dot for the working directory.")


def display_path(path: str | Path) -> str:
    """Returns a path for messages: relative to the working directory if it is below that."""
    path = Path(path)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _of_step(checkpoints: Path, held: Contents, step: int) -> Path:
    if step in held.steps:
        return checkpoints / str(step)
    there = ", ".join(map(str, held.steps)) or "none"
    raise CheckpointError(f"No checkpoint of step {step} in {checkpoints}; there are: {there}.{held.besides}")


def _is_checkpoint_name(name: str) -> bool:
    """Checks if a directory has the name of a checkpoint, in any condition."""
    return name.isdecimal() or name.startswith((DAMAGED, REMOVED)) or UNFINISHED in name
