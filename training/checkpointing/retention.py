"""Which checkpoints of a folder stay: the newest, those that are asked for, and nothing that is half written.

Process 0 of a run does this for all.
"""

import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .folder import DAMAGED, REMOVED, UNFINISHED, contents, set_aside


class Retention:
    """Removes what is not kept, in the background."""

    def __init__(self, directory: Path, keep: int) -> None:
        """Keeps so many; nothing is removed yet.

        Args:
            directory: The folder of checkpoints.
            keep: Newest checkpoints to keep, at least 1.
        """
        self._directory = directory
        self._keep = keep
        self._remover = ThreadPoolExecutor(1, "remove-checkpoints")

    def remove_old(self, saved: int, also_keep: Iterable[int]) -> None:
        """Removes all but the newest, and those of later steps, which belong to a course that was left.

        Args:
            saved: The step just saved.
            also_keep: Steps that stay beside the newest.
        """
        steps = contents(self._directory).steps
        ours = [step for step in steps if step <= saved]
        kept = {*ours[-self._keep :], *set(also_keep).intersection(ours)}
        for leaving in set_aside(self._directory, map(str, sorted({*steps} - kept)), REMOVED):
            self._remover.submit(shutil.rmtree, leaving, ignore_errors=True)

    def close(self) -> None:
        """Waits until what is on its way out is gone."""
        self._remover.shutdown()


def keep_foreign(directory: Path, step: int) -> None:
    """Renames what has the name of a checkpoint and is none, such as a file: Orbax would replace it."""
    if os.path.lexists(directory / str(step)) and step not in contents(directory).steps:
        set_aside(directory, [str(step)], DAMAGED)


def remove_leftovers(directory: Path) -> None:
    """Removes what kills have left: checkpoints half written, and those whose removal was interrupted."""
    _remove(directory, f"*{UNFINISHED}*", f"{REMOVED}*")


def remove_unfinished(directory: Path, step: int) -> None:
    """Removes what a failed save has written: where the disk is full, the next command needs the room."""
    _remove(directory, f"{step}{UNFINISHED}*")


def _remove(directory: Path, *patterns: str) -> None:
    for pattern in patterns:
        for leftover in directory.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)
