"""The interface of data: random access to examples of one shape, in two splits."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np

from ..mesh.errors import UserError, counted
from ..parallel.model.user_errors import as_user_error, is_no_end

WHOLE_BYTES = 1 << 28
"""A fingerprint covers all of data up to this size."""
SAMPLED_BLOCKS, BLOCK_BYTES, END_BYTES = 512, 1 << 16, 1 << 12
"""The sample of larger data: so many blocks of so many bytes, evenly spread, and both ends of every array."""


class BadDataError(UserError):
    """Invalid data, found while reading it: a retry cannot help."""

    exit_code = 3


class Source(Protocol):
    """Random access to examples, as for `grain.MapDataset.source`."""

    def __len__(self) -> int:
        """Returns the number of examples."""
        ...

    def __getitem__(self, index: int, /) -> dict[str, np.ndarray]:
        """Returns one example: arrays whose shapes and dtypes do not depend on the index, with "weights"."""
        ...


@runtime_checkable
class BatchedSource(Source, Protocol):
    """A source that reads many examples faster together than one by one; `take` also gives its single examples."""

    def __getitem__(self, index: int, /) -> dict[str, np.ndarray]:
        """Returns example `index`, in [0, len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return {name: np.asarray(rows[0]) for name, rows in self.take(np.array([index])).items()}

    def take(self, indices: np.ndarray, /) -> dict[str, np.ndarray]:
        """Returns the examples at `indices` (int64, (N,)) stacked on a new dim 0."""
        ...


class Splits(NamedTuple):
    """Training and evaluation examples of one source.

    Attributes:
        train: Training examples.
        evaluation: Held-out examples, or None without an evaluation split.
        vocabulary: Number of token ids, or None if examples are not tokens.
        description: One line for people.
        fingerprint: Changes if the data or the way it is cut changes; "" if unknown.
    """

    train: Source
    evaluation: Source | None
    vocabulary: int | None
    description: str
    fingerprint: str = ""

    def by_name(self) -> dict[str, Source]:
        """Returns the splits that there are, by name for messages."""
        found = {"training": self.train, "evaluation": self.evaluation}
        return {name: source for name, source in found.items() if source is not None}


def splits_of(sources: Sequence[Source], vocabulary: int | None, description: str, fingerprint: str) -> Splits:
    """Returns splits of one or two sources: training examples and, if given, held-out examples."""
    return Splits(sources[0], sources[1] if len(sources) > 1 else None, vocabulary, description, fingerprint)


def take(source: Source, indices: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the examples of `source` at `indices`, stacked on dim 0.

    Args:
        source: Any source; its own `take` is called if it has one.
        indices: int64, (N,), each in [0, len(source)); N >= 1.

    Returns:
        Name -> array of N rows, freshly allocated.

    Raises:
        UserError: The source raises StopIteration, or gives another number of rows than N, no arrays by name, or
            examples of different names or shapes.
    """
    with reading(source):
        if isinstance(source, BatchedSource):
            rows = source.take(indices)
            _check_rows(rows, source, len(indices))
            return rows
        return stack_examples([source[int(index)] for index in indices], source, indices)


def reading(source: Source) -> AbstractContextManager[None]:
    """Names the reader in a `with` block that raises StopIteration, which would end a loop over batches silently."""
    return as_user_error(f"reading examples of {reader_name(source)}", type(source), passes=is_no_end)


def reader_name(source: Source) -> str:
    """Returns the name of a source's class for messages: "Reader (my_data)"."""
    reader = type(source)
    return f"{reader.__qualname__} ({reader.__module__})"


def _check_rows(rows: Any, source: Source, number: int) -> None:
    """Raises a UserError unless a reader gave `number` rows of every array."""
    method = f"{reader_name(source)}.take"
    if not isinstance(rows, Mapping):
        raise UserError(f"{method} returned a {type(rows).__name__}; it must return a dict of arrays by name.")
    for name, array in rows.items():
        shape = np.shape(array)
        if shape[:1] == (number,):
            continue
        count = counted(shape[0], "row") if shape else "no dim of rows"
        raise UserError(
            f"{method} was asked for {counted(number, 'row')}, and returned {count} of {name}. It must return one row "
            "for each index, in this order; rows that do not count get weights of 0."
        )


def stack_examples(examples: Sequence[Mapping[str, Any]], source: Source, indices: np.ndarray) -> dict[str, np.ndarray]:
    """Stacks examples on a new dim 0.

    Args:
        examples: Name -> array, (N,) of them, N >= 1.
        source: Their reader, for messages.
        indices: int64, (N,), their numbers.

    Raises:
        UserError: Two differ in their names or shapes.
    """
    first = {name: np.shape(array) for name, array in examples[0].items()}
    for index, example in zip(indices, examples, strict=True):
        form = {name: np.shape(array) for name, array in example.items()}
        if form != first:
            raise UserError(
                f"{reader_name(source)}: example {indices[0]} has the shapes {first}, but example {index} has {form}; "
                "all must have the same names and shapes. Pad them, with weights of 0."
            )
    return {name: np.stack([example[name] for example in examples]) for name in first}


def is_stream(source: Source) -> bool:
    """Returns True if a source, or a part of it, can only be read forward: a loader, an iterator."""
    return getattr(source, "is_stream", False)


def origin_of(source: Source, index: int) -> str:
    """Returns the origin of an example, such as its file and row, or "" if the source does not know it."""
    origin = getattr(source, "origin", None)
    return origin(index) if origin is not None else ""


def find_part(starts: np.ndarray, index: Any) -> tuple[Any, Any]:
    """Returns the part that contains an index, and the place in it.

    Args:
        starts: int64, ascending, the first index of each part.
        index: An index, or an array of them.
    """
    part = np.searchsorted(starts, index, side="right") - 1
    return part, index - starts[part]


def spread_indices(number: int, count: int) -> list[int]:
    """Returns `count` indices in [0, number), evenly spread, or all if there are fewer."""
    return np.unique(np.linspace(0, number - 1, count).astype(int)).tolist()


def hash_fraction(key: bytes) -> float:
    """Returns a number in [0, 1) that depends on the key alone, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big") / 2**48


def divide_rows(count: int, eval_fraction: float, keys: Sequence[bytes] | None = None) -> list[np.ndarray]:
    """Divides rows into training and held-out rows: a row is held out if the hash of its key is below the fraction.

    Args:
        count: The number of rows.
        eval_fraction: The share to hold out, in [0, 1); 0 for no evaluation split.
        keys: The key of each row; None: its number.

    Returns:
        int64, the numbers of the training rows and, unless the fraction is 0, of the held-out rows.

    Raises:
        UserError: A split would have no rows.
    """
    if count and not eval_fraction:
        return [np.arange(count)]
    keys = [b"%d" % row for row in range(count)] if keys is None else keys
    held_out = np.array([hash_fraction(key) < eval_fraction for key in keys], bool)
    splits = [np.flatnonzero(~held_out), np.flatnonzero(held_out)][: 2 if eval_fraction else 1]
    if not all(map(len, splits)):
        raise UserError(
            f"data.eval_fraction={eval_fraction} of {count:,} rows holds out {held_out.sum():,}: both splits need "
            "rows. Give more rows, change data.eval_fraction, or set it to 0 to train without evaluation."
        )
    return splits


def fingerprint(arrays: Iterable[np.ndarray], *facts: object) -> str:
    """Returns a short hash of `facts` and of the content, dtypes and shapes of arrays.

    Args:
        arrays: Arrays of numbers. Up to 256 MiB together, every byte counts. Of more, which may be memory maps on slow
            storage, 512 blocks of 64 KiB are read, evenly spread, and the first and last 4 KiB of each array: this
            detects data that is appended, cut off, replaced or rewritten, but perhaps not a change of a few bytes.
        *facts: Values with a stable `repr`, such as the length of an example and the names of files.

    Returns:
        16 hexadecimal digits.
    """
    arrays = list(arrays)
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=8)
    total = sum(array.nbytes for array in arrays)
    for array in arrays:
        digest.update(f"{array.dtype}{array.shape}".encode())
        array = np.atleast_1d(array)
        for part in _blocks(array) if total <= WHOLE_BYTES else _sampled_blocks(array, total):
            digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yields blocks of rows, so that an array that is not contiguous is never copied whole."""
    rows = _rows_in(array, 256 * BLOCK_BYTES)
    return (array[start : start + rows] for start in range(0, len(array), rows))


def _sampled_blocks(array: np.ndarray, total: int) -> Iterator[np.ndarray]:
    """Yields both ends of an array, and its share of the blocks that are spread over all `total` bytes."""
    ends, rows = _rows_in(array, END_BYTES), _rows_in(array, BLOCK_BYTES)
    yield array[:ends]
    yield array[-ends:]
    for start in np.linspace(0, max(0, len(array) - rows), -(-SAMPLED_BLOCKS * array.nbytes // total), dtype=np.int64):
        yield array[start : start + rows]


def memory_map_of(array: Any) -> np.memmap | None:
    """Returns the memory map that an array is, or is a view of."""
    while array is not None and not isinstance(array, np.memmap):
        array = getattr(array, "base", None)
    return array


class MappedFiles:
    """The files of memory maps: a part that a file loses is an error of the bus (SIGBUS), without a message."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """Notes the files.

        Args:
            sizes: Path -> the bytes that the maps reach into the file.
        """
        self._sizes = dict(sizes)

    @classmethod
    def of_arrays(cls, arrays: Iterable[np.ndarray]) -> Self:
        """Returns the files of arrays, those in memory left out."""
        sizes: dict[str, int] = {}
        for array in arrays:
            mapped = memory_map_of(array)
            if mapped is not None and mapped.filename is not None:
                path = str(mapped.filename)
                sizes[path] = max(sizes.get(path, 0), mapped.offset + mapped.nbytes)
        return cls(sizes)

    def check(self) -> None:
        """Checks, before a part is read, that all files are still as long.

        Raises:
            BadDataError: A file is shorter, or gone.
        """
        for path, size in self._sizes.items():
            found = os.stat(path).st_size if os.path.exists(path) else 0
            if found < size:
                raise BadDataError(
                    f"{path} has {found:,} bytes now, but had at least {size:,} when this run opened it: it was cut or "
                    "written again while the run reads it. Restore it, and give new data another name."
                )


def _rows_in(array: np.ndarray, size: int) -> int:
    """Returns the number of rows that have about `size` bytes, at least 1."""
    return max(1, size * len(array) // max(1, array.nbytes))
