"""Language-model examples: windows of length + 1 tokens, cut one after the other from streams of token ids.

    stream    t0 t1 t2 t3 t4 t5 t6 ...        length 3
    example 0 inputs t0 t1 t2  targets t1 t2 t3
    example 1 inputs t3 t4 t5  targets t4 t5 t6

Each token but a stream's first is a target exactly once; the incomplete window at a stream's end is left out.
"""

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .packing import mark_documents
from .source import BadDataError
from .sources.texts.documents import Stream


class WindowSource:
    """Examples {"inputs": int32 (L,), "targets": int32 (L,), "weights": float32 (L,)} from streams of token ids.

    Given a separator, examples also hold {"segments": int32 (L,), "positions": int32 (L,)}, see `packing`.

    Windows are views: reading examples copies just their tokens, from memory or from a memory map.

    Args:
        streams: Where windows are cut from; none spans two streams.
        length: Tokens per example, L.
        vocabulary: Every id read is checked to be below it; None where that is known to hold.
        separator: The id that ends a document, to keep documents apart; None makes no difference between them.
    """

    def __init__(
        self, streams: Sequence[Stream], length: int, vocabulary: int | None = None, separator: int | None = None
    ) -> None:
        streams = [stream for stream in streams if len(stream.ids) > length]
        self._names = [stream.name for stream in streams]
        self._windows = [sliding_window_view(stream.ids, length + 1)[::length] for stream in streams]
        self._starts = np.cumsum([0, *(len(windows) for windows in self._windows)])
        self._length = length
        self._vocabulary = vocabulary
        self._separator = separator

    def __len__(self) -> int:
        """Number of whole windows in all streams."""
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Example `index`, in [0, len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return {name: rows[0] for name, rows in self.take(np.array([index])).items()}

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The examples at `indices` (int64, (N,)), stacked: arrays of shape (N, L).

        Raises:
            BadDataError: a token id does not fit the vocabulary.
        """
        ids = np.empty((len(indices), self._length + 1), np.int32)
        of_stream = np.searchsorted(self._starts, indices, side="right") - 1
        for stream in np.unique(of_stream):
            chosen = of_stream == stream
            windows = self._windows[stream][indices[chosen] - self._starts[stream]]
            self._check(windows, int(stream), indices[chosen])
            ids[chosen] = windows
        inputs, targets = np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])
        if self._separator is not None:
            return {"inputs": inputs, "targets": targets, **mark_documents(inputs, self._separator)}
        return {"inputs": inputs, "targets": targets, "weights": np.ones(inputs.shape, np.float32)}

    def origin(self, index: int) -> str:
        """Which tokens of which stream example `index` is, for messages."""
        stream = int(np.searchsorted(self._starts, index, side="right")) - 1
        first = (index - int(self._starts[stream])) * self._length
        return f"{self._names[stream]}, from token {first:,}"

    def _check(self, ids: np.ndarray, stream: int, indices: np.ndarray) -> None:
        """Raises where an id does not fit the vocabulary."""
        if self._vocabulary is None or (ids.max() < self._vocabulary and ids.min() >= 0):
            return
        wrong = ids.argmax() if ids.max() >= self._vocabulary else ids.argmin()
        row, column = np.unravel_index(wrong, ids.shape)
        place = (int(indices[row]) - int(self._starts[stream])) * self._length + int(column)
        raise BadDataError(
            f"{self._names[stream]} holds token id {ids[row, column]}; data.vocabulary={self._vocabulary} allows 0 .. "
            f"{self._vocabulary - 1}. It is token {place:,} of this split's part of it, in example "
            f"{indices[row]:,}. Raise data.vocabulary (0 finds it), or check data.dtype (a wrong one reads noise)."
        )
