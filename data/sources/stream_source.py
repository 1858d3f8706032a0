"""The rows of a stream by their number: read in one direction, with the first ones kept.

A PyTorch `DataLoader`, a `tf.data.Dataset`, a generator can only be read from its beginning. Their rows, one after the
other, are the samples of the run: row g is global sample g. Every process reads all rows and keeps its own, so the
order is that of one process, on any mesh; what it costs is that each process does the work of reading all. A run that
goes on reads the rows again that it has trained on, and drops them.

    rows of the stream   0 1 2 3 | 4 5 6 7 | ...     batches of four
    process 0 keeps      0 1     | 4 5     |
    process 1 keeps          2 3 |     6 7 |
"""

import bisect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ...mesh.errors import UserError
from ...mesh.user_errors import told_as_users
from .values import as_arrays, with_weights
from .workers import is_of_machine, told_of_lost_worker

Rows = dict[str, np.ndarray]
WITHOUT_END = 2**62
"""The length of a stream: more samples than any run has."""
HEAD_ROWS, HEAD_BYTES = 1024, 1 << 26
"""The first rows of a stream that are kept, for those who look at data before it is trained on."""


class StreamSource:
    """The rows of a stream by their number, read in one direction.

    Rows far back are read anew from the beginning, where the stream can begin again.

    Args:
        make: Gives what is iterated in an epoch, told its number from 0.
        batched: Whether an item holds many rows, on dim 0.
        names: What the entries of an item are, where items are tuples.
        once: Whether the iterator can be read only once.
        what: What it is, for messages.
    """

    is_stream = True

    def __init__(
        self, make: Callable[[int], Iterable[Any]], *, batched: bool, names: Sequence[str], once: bool, what: str
    ) -> None:
        self._make, self._batched, self._names, self._once, self.what = make, batched, names, once, what
        self._lock = threading.Lock()
        self._form: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
        self._head: list[Rows] = []
        self._head_starts = [0]
        self._head_bytes = 0
        self._begin()

    def _begin(self) -> None:
        """Before the first row."""
        self._epoch, self._items = -1, iter(())
        self._rows_of_epoch = 1
        self._chunk: Rows = {}
        self._start = self._stop = 0  # the rows that `_chunk` holds

    def __len__(self) -> int:
        """More than any run needs: a stream that ends begins again."""
        return WITHOUT_END

    def __getitem__(self, index: int) -> Rows:
        """Row `index`."""
        return {name: rows[0] for name, rows in self.take(np.array([index])).items()}

    def order(self, samples: np.ndarray, *, seed: int, shuffle: bool) -> np.ndarray:
        """Sample g is row g: a stream is shuffled by whoever makes it, or not at all."""
        del seed, shuffle
        return samples

    def take(self, indices: np.ndarray) -> Rows:
        """The rows at `indices` (int64, (N,)), stacked on dim 0.

        Raises:
            UserError: the stream has ended or would have to go back, and can be read only once; rows differ in names,
                dtypes or shapes; or whoever makes it raises something.
        """
        with self._lock:
            found: Rows = {}
            places = np.argsort(indices, kind="stable")
            ordered, done = indices[places], 0
            while done < len(ordered):
                rows, start = self._find(int(ordered[done]))
                until = int(np.searchsorted(ordered, start + len(next(iter(rows.values())))))
                for name, array in rows.items():
                    into = found.setdefault(name, np.empty((len(indices), *array.shape[1:]), array.dtype))
                    into[places[done:until]] = array[ordered[done:until] - start]
                done = until
        return found

    def first_rows(self) -> Rows:
        """The rows of the first item, all of them."""
        self.take(np.array([0]))
        return self._head[0]

    def rows_of_one_epoch(self) -> Iterator[Rows]:
        """All rows from the beginning to the end of the first epoch, an item at a time.

        Raises:
            UserError: As `take`.
        """
        self._begin()
        self._next_epoch()
        while (item := self._next_item()) is not None:
            self._take_in(item)
            yield self._chunk

    def origin(self, index: int) -> str:
        """Which row of the stream it is."""
        return f"row {index:,} of the {self.what}"

    def _find(self, index: int) -> tuple[Rows, int]:
        """The chunk that a row is in, and the number of its first row."""
        if index < self._head_starts[-1]:
            number = bisect.bisect_right(self._head_starts, index) - 1
            return self._head[number], self._head_starts[number]
        if index < self._start:
            self._go_back(index)
        while index >= self._stop:
            self._read()
        return self._chunk, self._start

    def _go_back(self, index: int) -> None:
        if self._once:
            raise UserError(
                f"the {self.what} has been read up to row {self._stop:,} and cannot go back to row {index:,}: it can "
                "be read only once. Give a function that makes a new one (told the number of the epoch), or something "
                "that can be iterated again."
            )
        self._begin()

    def _read(self) -> None:
        """Reads the next item that holds any rows."""
        item = self._next_item()
        while item is None:
            self._next_epoch()
            item = self._next_item()
        self._take_in(item)

    def _take_in(self, item: Any) -> None:
        """Makes an item the chunk that is at hand."""
        arrays = as_arrays(item, self._names)
        rows = with_weights(arrays if self._batched else {name: value[None] for name, value in arrays.items()}, 1)
        self._check(rows)
        self._start, self._stop = self._stop, self._stop + len(next(iter(rows.values())))
        self._rows_of_epoch += self._stop - self._start
        self._chunk = rows
        self._keep(rows)

    def _next_item(self) -> Any:
        """The next item, or None at the end of an epoch."""
        with told_as_users(f"reading the {self.what}", passes=is_of_machine), told_of_lost_worker(f"the {self.what}"):
            return next(self._items, None)

    def _next_epoch(self) -> None:
        if self._once and self._epoch == 0:
            raise UserError(
                f"the {self.what} ended after {self._stop:,} rows, and can be read only once; the run needs more. Give "
                "a function that makes a new one (told the number of the epoch), or something that can be iterated "
                "again; or lower train.steps."
            )
        if not self._rows_of_epoch:
            raise UserError(f"the {self.what} gave no rows in its epoch {self._epoch}. Give it some.")
        self._epoch += 1
        self._rows_of_epoch = 0
        beginning = told_as_users(f"beginning epoch {self._epoch} of the {self.what}", passes=is_of_machine)
        with beginning, told_of_lost_worker(f"the {self.what}"):  # workers may outlive epochs, and die between them
            self._items = iter(self._make(self._epoch))

    def _check(self, rows: Rows) -> None:
        """Raises where rows differ in form from the first ones, or arrays of a batch have different numbers of rows."""
        numbers = {name: len(array) if array.ndim else "no dim" for name, array in rows.items()}
        if len(set(numbers.values())) != 1 or "no dim" in numbers.values():
            raise UserError(
                f"an item of the {self.what} has the rows {numbers}; items are batches, with a row per example on dim "
                "0 of every array. Give single examples to from_examples."
            )
        form = {name: (array.dtype, array.shape[1:]) for name, array in rows.items()}
        self._form = self._form or form
        if form != self._form:
            told = [
                {name: f"{dtype}{list(shape)}" for name, (dtype, shape) in each.items()} for each in (self._form, form)
            ]
            raise UserError(
                f"rows of the {self.what} are {told[0]} at first and {told[1]} from row {self._stop:,} on; all need "
                "the same names, dtypes and shapes. Pad them, with weights of 0."
            )

    def _keep(self, rows: Rows) -> None:
        """Keeps the first rows."""
        if self._start != self._head_starts[-1] or self._start >= HEAD_ROWS:
            return
        self._head_bytes += sum(array.nbytes for array in rows.values())
        if self._head and self._head_bytes > HEAD_BYTES:
            return
        self._head.append(rows)
        self._head_starts.append(self._stop)
