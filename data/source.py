"""What the rest of the runtime needs to know about data: random access to examples of one shape, in two splits."""

import hashlib
import mmap
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from ..mesh.errors import UserError

WHOLE_BYTES = 1 << 28
"""Data up to this size goes into a fingerprint whole."""
SAMPLED_BLOCKS, BLOCK_BYTES, END_BYTES = 512, 1 << 16, 1 << 12
"""Of more: so many blocks of so many bytes, evenly spread over all of it, and the two ends of every array."""


class BadDataError(UserError):
    """The data itself is wrong, found while reading it: trying again cannot help."""

    exit_code = 3


class Source(Protocol):
    """Random access to examples, as `grain.MapDataset.source` takes it."""

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def __getitem__(self, index: int, /) -> dict[str, np.ndarray]:
        """One example: arrays whose shapes and dtypes do not depend on the index, "weights" among them."""
        ...


@runtime_checkable
class BatchedSource(Source, Protocol):
    """A source that reads many examples faster together than one by one."""

    def take(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        """The examples at `indices` (int64, (N,)) stacked on a new dim 0."""
        ...


class Splits(NamedTuple):
    """Training and evaluation examples of one source.

    Attributes:
        train: Training examples.
        evaluation: Held-out examples, or None without an evaluation split.
        vocabulary: Number of token ids, or None where examples are not tokens.
        description: One line for people.
        fingerprint: Changes when the data or the way it is cut changes; "" where unknown.
    """

    train: Source
    evaluation: Source | None
    vocabulary: int | None
    description: str
    fingerprint: str = ""


def take(source: Source, indices: np.ndarray) -> dict[str, np.ndarray]:
    """The examples of `source` at `indices`, stacked on dim 0.

    Args:
        source: Any source; one with a `take` of its own is asked once, others example by example.
        indices: int64, (N,), each in [0, len(source)); N >= 1.

    Returns:
        Name -> array of N rows, freshly allocated.
    """
    if isinstance(source, BatchedSource):
        return source.take(indices)
    examples = [source[int(index)] for index in indices]
    return {name: np.stack([example[name] for example in examples]) for name in examples[0]}


def is_stream(source: Source) -> bool:
    """Whether a source, or a part of it, is read in one direction: a loader, an iterator."""
    return getattr(source, "is_stream", False)


def fingerprint(arrays: Iterable[np.ndarray], *facts: object) -> str:
    """A short hash of `facts` and of what arrays hold, their types and their sizes.

    Args:
        arrays: Any arrays of numbers. Up to 256 MiB together, every byte counts. Of more, which may be memory maps on
            slow storage, 512 blocks of 64 KiB are read, evenly spread, and the first and last 4 KiB of each array: what
            is appended, cut off, replaced or written anew is noticed, a change of a few bytes in place may not be.
        *facts: Values with a stable `repr`, such as the length of an example and the names of files.

    Returns:
        16 hexadecimal digits.
    """
    arrays = list(arrays)
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=8)
    total = sum(array.nbytes for array in arrays)
    for array in arrays:
        digest.update(f"{array.dtype}{array.shape}".encode())
        for part in _blocks(array) if total <= WHOLE_BYTES else _sampled_blocks(array, total):
            digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """An array in blocks of rows, so that none that is not contiguous is copied whole."""
    array = array.reshape(1) if array.ndim == 0 else array
    rows = _rows_in(array, 256 * BLOCK_BYTES)
    return (array[start : start + rows] for start in range(0, len(array), rows))


def _sampled_blocks(array: np.ndarray, total: int) -> Iterator[np.ndarray]:
    """The two ends of an array, and its part of the blocks that are spread over all `total` bytes."""
    array = array.reshape(1) if array.ndim == 0 else array
    _advise(array, "MADV_RANDOM")  # a page that is read brings megabytes with it otherwise
    ends, rows = _rows_in(array, END_BYTES), _rows_in(array, BLOCK_BYTES)
    yield array[:ends]
    yield array[-ends:]
    for start in np.linspace(0, max(0, len(array) - rows), -(-SAMPLED_BLOCKS * array.nbytes // total), dtype=np.int64):
        yield array[start : start + rows]
    _advise(array, "MADV_NORMAL")


def _advise(array: Any, advice: str) -> None:
    """Tells the operating system how a memory map is going to be read, where `array` is one."""
    while array is not None and not isinstance(array, np.memmap):
        array = getattr(array, "base", None)
    if array is not None and hasattr(mmap, advice):
        array._mmap.madvise(getattr(mmap, advice))  # pyright: ignore[reportAttributeAccessIssue]


def _rows_in(array: np.ndarray, size: int) -> int:
    """How many rows have about so many bytes, at least 1."""
    return max(1, size * len(array) // max(1, array.nbytes))
