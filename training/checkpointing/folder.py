"""The folder of a run's checkpoints: which are complete, which a kill has left half done, which are set aside.

40                              complete: it was renamed when every process had written its part
60.orbax-checkpoint-tmp         unfinished: ignored, and removed by the next save
damaged-20, damaged-20-2        could not be restored: kept, never restored or counted
removed-10                      on its way out: a kill came before it was gone
"""

import os
from collections.abc import Iterable
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

UNFINISHED = ".orbax-checkpoint-tmp"
"""Part of the name of a checkpoint under way."""
REMOVED = "removed-"
"""Prefix of a checkpoint on its way out: renamed first, so that a kill during the removal leaves no half checkpoint."""
DAMAGED = "damaged-"
"""Prefix of a checkpoint that could not be restored: kept for whoever wants to look, never restored or counted."""
CHECKSUMS = "checksums"
"""Path of the array of checksums within the arrays of a checkpoint, see checksums.py."""
STATE = "state"
"""Directory of a checkpoint that contains its arrays."""
DESCRIPTION = "checksums.json"
"""File in STATE with the checksums of the files that describe a checkpoint, see description.py."""


class Contents(NamedTuple):
    """What a folder of checkpoints holds.

    Attributes:
        steps: of complete checkpoints, in order.
        damaged: names of those that are set aside.
        unfinished: names of those that were never completed.
        leaving: names of those whose removal was interrupted.
    """

    steps: tuple[int, ...]
    damaged: tuple[str, ...]
    unfinished: tuple[str, ...]
    leaving: tuple[str, ...]


def contents(directory: Path) -> Contents:
    """Looks what a folder of checkpoints holds; a folder that is not there holds nothing.

    Raises:
        OSError: It cannot be listed.
    """
    names = sorted(each.name for each in directory.iterdir() if each.is_dir()) if directory.is_dir() else []
    steps = sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)
    return Contents(
        tuple(steps),
        damaged=tuple(name for name in names if name.startswith(DAMAGED)),
        unfinished=tuple(name for name in names if UNFINISHED in name),
        leaving=tuple(name for name in names if name.startswith(REMOVED)),
    )


def set_aside(directory: Path, names: Iterable[str], prefix: str) -> list[Path]:
    """Renames checkpoints within their folder, so that they are no longer restored or counted.

    Args:
        directory: The folder of checkpoints.
        names: Whose.
        prefix: What their names begin with afterwards: DAMAGED or REMOVED.

    Returns:
        Where they are now.
    """
    moved = []
    for name in names:
        target = _unused(directory / f"{prefix}{name}")
        (directory / name).rename(target)
        moved.append(target)
    return moved


def size_on_disk(folder: Path) -> int:
    """The bytes of all files below a folder; of those that go away meanwhile none."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _unused(path: Path) -> Path:
    """The path, or the first of path-2, path-3, ... that nothing has."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return next(each for each in chain([path], numbered) if not os.path.lexists(each))
