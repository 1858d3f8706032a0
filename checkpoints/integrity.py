"""`spmdkit checkpoint verify`: compares every array of a checkpoint with its checksum."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..layouts.sizes import counted, format_bytes
from ..mesh.errors import first_lines, printable
from .damage import MAX_LISTED, DamagedCheckpoint
from .directory import Found, display_path
from .restore import StoredCheckpoint

PROGRESS_SECONDS = 5.0
"""Seconds between two lines of progress."""


class ByteProgress:
    """Prints a line about a long operation to stderr now and then; none in the first seconds."""

    def __init__(self, what: str, total: int) -> None:
        """Begins to count.

        Args:
            what: The operation, such as "step 40".
            total: The bytes of the whole operation.
        """
        self._what, self._total, self._done = what, total, 0
        self._printed = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Counts bytes that are done."""
        self._done += num_bytes
        now = time.monotonic()
        if now - self._printed >= PROGRESS_SECONDS:
            self._printed = now
            done, total = format_bytes(self._done), format_bytes(self._total)
            print(printable(f"{self._what}: {done} of {total}"), file=sys.stderr, flush=True)


class Verdict(NamedTuple):
    """The result of verifying one checkpoint.

    Attributes:
        folder: Its directory.
        arrays: The number of arrays that were read.
        num_bytes: Their bytes.
        problems: The path of an array, or "" for the whole checkpoint -> the problem.
        foreign: The reason why it is not of the run in whose directory it is; "" if it is.
    """

    folder: Path
    arrays: int
    num_bytes: int
    problems: dict[str, str]
    foreign: str = ""

    @property
    def is_whole(self) -> bool:
        """True if no problem was found."""
        return not self.problems and not self.foreign

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        sizes = {"arrays": self.arrays, "bytes": self.num_bytes}
        found = {"folder": str(self.folder), "whole": self.is_whole, **sizes, "problems": self.problems}
        return {**found, "foreign": self.foreign}

    def __str__(self) -> str:
        where = display_path(self.folder)
        if self.is_whole:
            read = f"{counted(self.arrays, 'array')}, {format_bytes(self.num_bytes)}"
            return printable(f"{where}: whole; {read} are bit for bit what was saved")
        problems = [f"{path}: {problem}" if path else problem for path, problem in self.problems.items()]
        if self.foreign and not problems:
            return printable(f"{where}: OF ANOTHER RUN\n  {self.foreign}")
        if self.foreign:
            problems.append(self.foreign)
        return printable("\n  ".join([f"{where}: DAMAGED", *first_lines(problems, MAX_LISTED)]))


def verify(found: Found) -> Iterator[Verdict]:
    """Verifies the checkpoint that was chosen, or all of a run, oldest first.

    Raises:
        CheckpointError: There is none.
        CheckpointUnavailable: The machine or the file system cannot read one.
    """
    every = [found.checkpoints / str(step) for step in found.contents.steps]
    return map(verify_one, every if every and found.chosen is None else [found.one])


def verify_one(folder: Path) -> Verdict:
    """Reads every array of a checkpoint and compares it with its checksum; continues after a damaged one.

    Raises:
        CheckpointUnavailable: The machine or the file system cannot read it.
    """
    try:
        stored = StoredCheckpoint(folder, of_any_run=True)
        sizes = {path: stored.num_bytes(path) for path in stored.arrays}
    except DamagedCheckpoint as error:
        return Verdict(folder, 0, 0, {"": _problem(folder, error)})
    progress = ByteProgress(display_path(folder), sum(sizes.values()))
    problems: dict[str, str] = {}
    for group in stored.groups(sizes):
        try:
            stored.read(group)
        except DamagedCheckpoint:
            for path in group:
                try:
                    stored.read([path])
                except DamagedCheckpoint as error:
                    problems[path] = _problem(folder, error)
        progress.add(sum(sizes[path] for path in group))
    return Verdict(folder, len(sizes), sum(sizes.values()), problems, stored.foreign)


def summary(verdicts: list[Verdict]) -> str:
    """Returns the last line: the number of damaged and foreign checkpoints, and what to do about them."""
    damaged = [verdict.folder.name for verdict in verdicts if verdict.problems]
    foreign = [verdict.folder.name for verdict in verdicts if verdict.foreign]
    of_all = counted(len(verdicts), "checkpoint")
    if not damaged and not foreign:
        return f"{of_all} verified"
    sentences: list[str] = []
    if damaged:
        sentences.append(
            f"{len(damaged)} of {of_all} damaged: {', '.join(damaged)}. A run that resumes skips a damaged checkpoint, "
            "uses the one before it, and sets the damaged one aside; you need not remove anything"
        )
    if foreign:
        sentences.append(
            f"{len(foreign)} of {of_all} of another run: {', '.join(foreign)}. They cannot be resumed, loaded or "
            "exported from here: move them out of this directory"
        )
    return ". ".join(sentences)


def _problem(folder: Path, error: Exception) -> str:
    """Returns the problem without the name of the checkpoint, which the line above contains."""
    text = str(error).removeprefix(f"The checkpoint {folder} is damaged: ")
    return "it reads as other bits than were saved" if "their checksums differ" in text else text
