"""Data that can only be read from its beginning, as splits: loaders, iterators and generators of other libraries.

Their rows, one after the other, are the samples of the run: row g is global sample g. Every process reads all rows and
keeps its own, so the order is that of one process on any mesh; the cost is that each process does the work of reading
all. A resumed run reads the rows again that it has trained on, and drops them.

    rows of the stream   0 1 2 3 | 4 5 6 7 | ...     batches of four
    process 0 keeps      0 1     | 4 5     |
    process 1 keeps          2 3 |     6 7 |

A killed worker process of a loader is a fault of the machine, not of the code: its error is raised unchanged, and
`mesh.known_causes` recognizes it.
"""

import bisect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ...layouts.sizes import format_bytes
from ...mesh.errors import UserError
from ...mesh.known_causes import lost_worker
from ...parallel.model.user_errors import user_items
from ..examples import PAIR, as_arrays, count_rows, with_weights
from ..source import BatchedSource, Splits, fingerprint
from ..value_ranges import check_vocabulary
from .arrays import ArraySource

Rows = dict[str, np.ndarray]
STREAM_LENGTH = 2**62
"""The length of a stream: more samples than any run has."""
HEAD_BYTES = 1 << 26
"""Bytes of the first items that are kept, for checks of the data before training; the first item is always kept."""
MAX_HELD_OUT = 1 << 30
"""Bytes of held-out examples, which are read into memory."""
ONCE = (
    "it can be read only once. Give a function of the number of the epoch that makes a new one, or an iterable that "
    "can begin again"
)


class StreamSource(BatchedSource):
    """The rows of a stream by their number, read in one direction.

    If an earlier row is needed again, the stream is read again from the beginning, if it can begin again.

    Args:
        make: The function from the number of an epoch, from 0, to an iterable.
        batched: An item contains many rows, on dim 0.
        names: The names of the entries of an item, if items are tuples.
        once: The iterator can be read only once.
        what: The name of the stream, for messages.
    """

    is_stream = True

    def __init__(
        self, make: Callable[[int], Iterable[Any]], *, batched: bool, names: Sequence[str], once: bool, what: str
    ) -> None:
        self._make, self._batched, self._names, self._once, self.what = make, batched, names, once, what
        self._lock = threading.Lock()
        self._form: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._head: list[Rows] = []
        self._head_starts = [0]
        self._head_bytes = 0
        self._begin()

    def __len__(self) -> int:
        """Returns more than any run needs: a stream that ends begins again."""
        return STREAM_LENGTH

    def order(self, samples: np.ndarray, *, seed: int, shuffle: bool) -> np.ndarray:
        """Returns the samples: sample g is row g, and only the stream itself can shuffle."""
        return samples

    def take(self, indices: np.ndarray) -> Rows:
        """Returns the rows at `indices` (int64, (N,)), stacked on dim 0.

        Raises:
            UserError: The stream has ended or would have to go back, and can be read only once; rows differ in names,
                dtypes or shapes; or the code of the stream raises an error.
        """
        with self._lock:
            found: Rows = {}
            places = np.argsort(indices, kind="stable")
            ordered, done = indices[places], 0
            while done < len(ordered):
                rows, start = self._find(int(ordered[done]))
                until = int(np.searchsorted(ordered, start + _count(rows)))
                for name, array in rows.items():
                    into = found.setdefault(name, np.empty((len(indices), *array.shape[1:]), array.dtype))
                    into[places[done:until]] = array[ordered[done:until] - start]
                done = until
        return found

    def first_rows(self) -> Rows:
        """Returns all rows of the first item."""
        self.take(np.array([0]))
        return self._head[0]

    def rows_of_one_epoch(self) -> Iterator[Rows]:
        """Yields all rows of the first epoch, an item at a time.

        Raises:
            UserError: See `take`.
        """
        return (self._rows(item, 0) for item in self._items(0))

    def origin(self, index: int) -> str:
        """Returns the name of a row in messages."""
        return f"row {index:,} of the {self.what}"

    def _begin(self) -> None:
        """Resets the position to before the first row."""
        self._chunks = self._read_chunks()
        self._chunk: Rows = {}
        self._start = self._stop = 0  # the rows of `_chunk`

    def _find(self, index: int) -> tuple[Rows, int]:
        """Returns the item that contains a row, and the number of its first row."""
        if index < self._head_starts[-1]:
            number = bisect.bisect_right(self._head_starts, index) - 1
            return self._head[number], self._head_starts[number]
        if index < self._start:
            if self._once:
                raise UserError(
                    f"the {self.what} is at row {self._stop:,} and cannot go back to row {index:,}: {ONCE}."
                )
            self._begin()
        while index >= self._stop:
            self._chunk = self._next_chunk()
            self._start, self._stop = self._stop, self._stop + _count(self._chunk)
            if self._start == self._head_starts[-1] and self._head_bytes < HEAD_BYTES:
                self._head.append(self._chunk)
                self._head_starts.append(self._stop)
                self._head_bytes += _size(self._chunk)
        return self._chunk, self._start

    def _next_chunk(self) -> Rows:
        """Reads the rows of the next item.

        Raises:
            UserError: See `take`, or an earlier read has failed: the stream stays where it was.
        """
        rows = next(self._chunks, None)
        if rows is None:
            raise UserError(
                f"the {self.what} has failed at row {self._stop:,} before, and cannot be read further. Correct that "
                "error, and make the data anew."
            )
        return rows

    def _read_chunks(self) -> Iterator[Rows]:
        """Yields the rows of all epochs, an item at a time."""
        read = 0
        for epoch in range(1 if self._once else STREAM_LENGTH):
            before = read
            for item in self._items(epoch):
                rows = self._rows(item, read)
                read += _count(rows)
                yield rows
            if read == before:
                raise UserError(f"the {self.what} gave no rows in its epoch {epoch}. Give it some.")
        raise UserError(f"the {self.what} ended after {read:,} rows; the run needs more: {ONCE}; or lower train.steps.")

    def _items(self, epoch: int) -> Iterator[Any]:
        """Yields the items of one epoch; errors of the user's code are told with their place."""
        return user_items(f"reading the {self.what}", lambda: self._make(epoch), passes=_is_of_machine)

    def _rows(self, item: Any, number: int) -> Rows:
        """Returns an item as rows, after checking their form; `number` is the number of the first row."""
        arrays = as_arrays(item, self._names)
        rows = with_weights(arrays if self._batched else {name: value[None] for name, value in arrays.items()}, 1)
        count_rows(rows, f"the arrays in an item of the {self.what}", " Give single examples to from_examples.")
        form = {name: (str(array.dtype), array.shape[1:]) for name, array in rows.items()}
        self._form = self._form or form
        if form != self._form:
            raise UserError(
                f"rows of the {self.what} are {self._form} at first and {form} from row {number:,} on; all must have "
                "the same names, dtypes and shapes. Pad them, with weights of 0."
            )
        return rows


def _is_of_machine(error: Exception) -> bool:
    """Returns True if an error comes from the machine, not from the code that creates a stream."""
    return isinstance(error, OSError | MemoryError) or bool(lost_worker(error))


def _count(rows: Rows) -> int:
    """Returns the number of rows."""
    return len(next(iter(rows.values())))


def _size(rows: Rows) -> int:
    """Returns the size of rows in bytes."""
    return sum(array.nbytes for array in rows.values())


def from_batches(
    train: Any, evaluation: Any = None, *, names: Sequence[str] = PAIR, vocabulary: int | None = None
) -> Splits:
    """Makes splits of batches that come one after the other, such as those of a PyTorch `DataLoader`.

    The runtime makes its own batches of their rows: the given batches may have any size, and different sizes.

    Args:
        train: An iterable, iterated once an epoch; or a function from the number of the epoch, from 0, to an iterable.
            An item is a mapping, nested or not, or a tuple, of arrays or tensors with rows on dim 0. "weights" of 1
            are added if missing. Every process must get the same rows in the same order: seed all shuffling.
        evaluation: The held-out examples, likewise; it must end, and is read into memory once.
        names: The names of the entries of a tuple.
        vocabulary: Number of token ids, if examples are tokens.

    Returns:
        The splits. A resume reads and drops the rows before it. Their fingerprint is that of the first batch, so a run
        stops before the first step if first batches differ between processes, or from those before a resume.

    Raises:
        UserError: Rows are missing, or they have another form; or over 1 GiB of held-out examples.
    """
    return _from_stream(train, evaluation, names, vocabulary, batched=True)


def from_examples(
    train: Any, evaluation: Any = None, *, names: Sequence[str] = PAIR, vocabulary: int | None = None
) -> Splits:
    """Makes splits of examples that come one after the other, such as those of a generator: see `from_batches`.

    Args:
        train: Like that of `from_batches`, but an item is one example.
        evaluation: The held-out examples, likewise; it must end, and is read into memory once.
        names: The names of the entries of a tuple.
        vocabulary: Number of token ids, if examples are tokens.

    Returns:
        The splits, like those of `from_batches`.

    Raises:
        UserError: See `from_batches`.
    """
    return _from_stream(train, evaluation, names, vocabulary, batched=False)


def _from_stream(train: Any, evaluation: Any, names: Sequence[str], vocabulary: int | None, *, batched: bool) -> Splits:
    check_vocabulary(vocabulary)
    source = _stream(train, names, batched)
    first = source[0]
    held_out = None if evaluation is None else _held_out(_stream(evaluation, names, batched))
    if held_out is not None and held_out[0].keys() != first.keys():
        raise UserError(
            f"training rows have {', '.join(sorted(first))}, but evaluation rows {', '.join(sorted(held_out[0]))}; "
            "the names must be the same."
        )
    kind = "batches" if batched else "examples"
    described = source.what + (f", {len(held_out):,} evaluation examples" if held_out is not None else "")
    content = fingerprint([array for _, array in sorted(source.first_rows().items())], sorted(first), kind)
    return Splits(source, held_out, vocabulary, described, content)


def _held_out(stream: StreamSource) -> ArraySource:
    """Reads the rows of one epoch into memory."""
    parts, size = [], 0
    for rows in stream.rows_of_one_epoch():
        parts.append(rows)
        size += _size(rows)
        if size > MAX_HELD_OUT:
            raise UserError(
                f"the {stream.what} for evaluation has more than {format_bytes(MAX_HELD_OUT)}, and is read into "
                "memory. Give fewer rows, or a dataset with random access (Splits._replace(evaluation=...))."
            )
    if not parts:
        raise UserError(f"the {stream.what} for evaluation gave no rows. Give some, or evaluation=None.")
    return ArraySource({name: np.concatenate([rows[name] for rows in parts]) for name in parts[0]})


def _stream(given: Any, names: Sequence[str], batched: bool) -> StreamSource:
    """Returns the rows of an iterable, an iterator, or a function of the epoch."""
    once = hasattr(given, "__next__")
    is_iterable = once or hasattr(given, "__iter__")
    if not is_iterable and not callable(given):
        raise UserError(f"a {type(given).__name__} cannot be iterated; give an iterable or a function of the epoch.")
    name = f"a {type(given).__name__}" if is_iterable else getattr(given, "__name__", type(given).__name__)
    what = f"stream of {'batches' if batched else 'examples'} of {name}"
    make: Any = (lambda epoch: given) if is_iterable else given
    return StreamSource(make, batched=batched, names=names, once=once, what=what)
