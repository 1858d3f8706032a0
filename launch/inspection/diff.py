"""`spmdkit checkpoint diff`: how two checkpoints differ, array by array; of one run or of two, from any mesh."""

from collections.abc import Iterator
from math import inf
from typing import Any, NamedTuple

import numpy as np

from ...layouts.sizes import counted
from ...mesh.text import printable
from ...training.checkpointing.checksums import part_checksum
from ...training.checkpointing.errors import kind
from .progress import Progress
from .stored import StoredCheckpoint

MAX_LISTED = 40
"""Arrays that are listed; `--json` has all."""


class Difference(NamedTuple):
    """How one array differs.

    Attributes:
        path: of the array.
        what: in words.
        elements: how many of them have other bits; None where the two cannot be compared.
        absolute: the largest |a - b|, as float64; infinite where one is not finite and the other is.
        relative: the largest |a - b| / max(|a|, |b|), likewise; at most 2.
    """

    path: str
    what: str
    elements: int | None = None
    absolute: float | None = None
    relative: float | None = None


class Differences(NamedTuple):
    """How two checkpoints differ.

    Attributes:
        compared: how many arrays both hold in the same shape and dtype.
        found: the arrays that differ, in order.
    """

    compared: int
    found: tuple[Difference, ...]

    def to_json(self) -> dict[str, Any]:
        """The same as plain values; what is infinite as the text "inf"."""
        differences = [
            {name: "inf" if value == inf else value for name, value in each._asdict().items()} for each in self.found
        ]
        return {"equal": not self.found, "compared": self.compared, "differences": differences}

    def __str__(self) -> str:
        if not self.found:
            return f"equal: {counted(self.compared, 'array')}, bit for bit"
        width = max(len(each.path) for each in self.found[:MAX_LISTED])
        lines = [f"{each.path:<{width}}  {each.what}" for each in self.found[:MAX_LISTED]]
        if len(self.found) > MAX_LISTED:
            lines.append(f"... and {len(self.found) - MAX_LISTED} more")
        comparable = [each for each in self.found if each.elements is not None]
        same = self.compared - len(comparable)
        lines.append(f"different: {counted(len(self.found), 'array')}; {same} of {self.compared} compared are equal")
        return printable("\n".join(lines))


def diff(first: StoredCheckpoint, second: StoredCheckpoint, *, only_parameters: bool = False) -> Differences:
    """Compares two checkpoints.

    Args:
        first: One.
        second: The other.
        only_parameters: Leave out the step, the optimizer's state and the key.

    Raises:
        DamagedCheckpoint: One of them is damaged, or has other bits than were saved.
        CheckpointUnavailable: The machine or the file system does not let one be read.
    """
    kinds = [
        {path: array for path, array in each.arrays.items() if path.startswith("params/") or not only_parameters}
        for each in (first, second)
    ]
    ours, theirs = kinds
    common = [path for path in ours if path in theirs and kind(ours[path]) == kind(theirs[path])]
    progress = Progress("compared", sum(ours[path].nbytes for path in common))
    found = [*_unlike(ours, theirs)]
    for path in common:
        difference = _compare(first, second, path, progress)
        if difference is not None:
            found.append(difference)
    return Differences(len(common), tuple(found))


def _unlike(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[Difference]:
    for path in ours:
        if path not in theirs:
            yield Difference(path, f"only in the first: {kind(ours[path])}")
        elif kind(ours[path]) != kind(theirs[path]):
            yield Difference(path, f"{kind(ours[path])} in the first, {kind(theirs[path])} in the second")
    for path in theirs:
        if path not in ours:
            yield Difference(path, f"only in the second: {kind(theirs[path])}")


def _compare(first: StoredCheckpoint, second: StoredCheckpoint, path: str, progress: Progress) -> Difference | None:
    elements, absolute, relative, checksum = 0, 0.0, 0.0, 0
    for region, ours in first.parts(path):
        theirs = second.part(path, region)
        checksum += part_checksum(theirs, [each.start for each in region], first.arrays[path].shape)
        progress.add(ours.nbytes)
        other = _bits(ours) != _bits(theirs)
        if not other.any():
            continue
        elements += int(other.any(-1).sum())
        part = _largest(ours, theirs)
        absolute, relative = max(absolute, part[0]), max(relative, part[1])
    second.compare(path, checksum)
    if not elements:
        return None
    size = first.arrays[path].size
    share = f"{elements:,} of {counted(size, 'element')}" if size > 1 else "the value"
    what = f"{share}, at most {absolute:.3g} absolute, {relative:.3g} relative"
    return Difference(path, what, elements, absolute, relative)


def _bits(array: np.ndarray) -> np.ndarray:
    """(elements, bytes of one)."""
    return np.ascontiguousarray(array).reshape(-1, 1).view(np.uint8)


def _largest(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """The largest absolute and relative difference of two parts, in float64."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        a, b = (each.astype(np.complex128 if each.dtype.kind == "c" else np.float64) for each in (ours, theirs))
        gap = np.abs(a - b)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        gap = np.where(same, 0.0, np.where(np.isnan(gap), inf, gap))
        scale = np.maximum(np.abs(a), np.abs(b))
        ratio = np.where(same, 0.0, np.where(np.isfinite(scale), gap / np.where(scale == 0, 1.0, scale), inf))
    return float(gap.max()), float(ratio.max())
