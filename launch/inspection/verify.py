"""`spmdkit checkpoint verify`: is every array of a checkpoint what was saved?"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ...layouts.sizes import counted, format_bytes
from ...mesh.text import printable
from ...training.checkpointing.errors import MAX_LISTED, DamagedCheckpoint
from .finding import Found, shown
from .progress import Progress
from .stored import StoredCheckpoint


class Verdict(NamedTuple):
    """What was found of one checkpoint.

    Attributes:
        folder: of it.
        arrays: how many were read.
        num_bytes: how much that was.
        checksums: whether it has some to compare with; without, a flipped bit may not show.
        problems: path of an array, or "" for the whole -> what is wrong.
    """

    folder: Path
    arrays: int
    num_bytes: int
    checksums: bool
    problems: dict[str, str]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "folder": str(self.folder),
            "whole": self.is_whole,
            "checksums": self.checksums,
            "arrays": self.arrays,
            "bytes": self.num_bytes,
            "problems": self.problems,
        }

    def __str__(self) -> str:
        return printable("\n".join(self._lines()))

    def _lines(self) -> Iterator[str]:
        read = f"{counted(self.arrays, 'array')}, {format_bytes(self.num_bytes)}"
        if self.is_whole and self.checksums:
            yield f"{shown(self.folder)}: whole; {read} are bit for bit what was saved"
        elif self.is_whole:
            yield (
                f"{shown(self.folder)}: readable; {read}. It is of an earlier version and has no checksums: a "
                "changed bit that can still be read does not show"
            )
        else:
            yield f"{shown(self.folder)}: DAMAGED"
            for path, problem in list(self.problems.items())[:MAX_LISTED]:
                yield f"  {path}: {problem}" if path else f"  {problem}"
            if len(self.problems) > MAX_LISTED:
                yield f"  ... and {len(self.problems) - MAX_LISTED} more"


def verify(found: Found) -> Iterator[Verdict]:
    """Verifies the checkpoint that is meant, or all of a run, oldest first.

    Raises:
        CheckpointError: There is none.
        CheckpointUnavailable: The machine or the file system does not let one be read.
    """
    if found.chosen is not None or not found.contents.steps:
        yield verify_one(found.one)
        return
    for step in found.contents.steps:
        yield verify_one(found.checkpoints / str(step))


def verify_one(folder: Path) -> Verdict:
    """Reads every array of a checkpoint and compares it with its checksum; goes on where one is damaged.

    Raises:
        CheckpointUnavailable: The machine or the file system does not let it be read.
    """
    problems: dict[str, str] = {}
    try:
        stored = StoredCheckpoint(folder)
        checked = stored.checksums is not None and stored.is_described
    except DamagedCheckpoint as error:
        return Verdict(folder, 0, 0, False, {"": _short(folder, error)})
    sizes = {}
    for path in stored.names:
        try:
            sizes[path] = stored.array(path).nbytes
        except DamagedCheckpoint as error:
            problems[path] = _short(folder, error)
    progress = Progress(shown(folder), sum(sizes.values()))
    for path in sizes:
        try:
            missing = stored.missing_chunks(path)
            if missing:
                problems[path] = f"{counted(missing, 'piece')} of it missing"
                continue
            for _, part in stored.parts(path):
                progress.add(part.nbytes)
        except DamagedCheckpoint as error:
            problems[path] = _short(folder, error)
    return Verdict(folder, len(sizes), sum(sizes.values()), checked, problems)


def summary(verdicts: list[Verdict]) -> str:
    """The last line: how many are damaged, and what to do about it."""
    damaged = [each.folder.name for each in verdicts if not each.is_whole]
    if not damaged:
        return f"{counted(len(verdicts), 'checkpoint')} verified"
    return (
        f"{len(damaged)} of {counted(len(verdicts), 'checkpoint')} damaged: {', '.join(damaged)}. A run that resumes "
        "passes over a damaged checkpoint, uses the one before it, and sets the damaged one aside; nothing has to be "
        "removed"
    )


def _short(folder: Path, error: Exception) -> str:
    """What is wrong, without the name of the checkpoint, which stands above."""
    text = str(error).removeprefix(f"The checkpoint {folder} is damaged: ")
    return "it reads as other bits than were saved" if "their checksums differ" in text else text
