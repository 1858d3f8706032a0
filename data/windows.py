"""Language-model examples: windows of length + 1 tokens, cut one after the other from streams of token ids.

    stream    t0 t1 t2 t3 t4 t5 t6 ...        length 3
    example 0 inputs t0 t1 t2  targets t1 t2 t3
    example 1 inputs t3 t4 t5  targets t4 t5 t6

Each token except a stream's first is a target exactly once; the incomplete window at a stream's end is left out.

Packed examples keep the documents in a window apart:

    inputs      a b 0 c d 0 e       0 ends a document
    targets     b 0 c d 0 e f
    segments    0 0 0 1 1 1 2       attention stays within a segment
    positions   0 1 2 0 1 2 0       counted from the document's first token in the example
    weights     1 1 0 1 1 0 1       the token after the end of a document cannot be predicted from it

A separator belongs to the document that it ends, and is a target like any token. If an example cuts a document, the
rest of it is a new document in the next example.

Source: Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination".
"""

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .source import BadDataError, BatchedSource, MappedFiles, find_part
from .sources.texts import Document


def mark_documents(inputs: np.ndarray, separator: int) -> dict[str, np.ndarray]:
    """Returns the further arrays of packed examples.

    Args:
        inputs: int32, (N, L), token ids.
        separator: The id that ends a document.

    Returns:
        "segments": int32, (N, L), 0, 1, 2, ... in each example; "positions": int32, (N, L); "weights": float32, (N, L),
        0 if the target is the first token of another document.
    """
    ends = inputs == separator
    starts = np.zeros_like(ends)
    starts[:, 1:] = ends[:, :-1]
    column = np.arange(inputs.shape[1], dtype=np.int32)
    first = np.maximum.accumulate(np.where(starts, column, 0), axis=1)
    return {
        "segments": np.cumsum(starts, axis=1, dtype=np.int32),
        "positions": (column - first).astype(np.int32),
        "weights": (~ends).astype(np.float32),
    }


class WindowSource(BatchedSource):
    """Examples {"inputs": int32 (L,), "targets": int32 (L,), "weights": float32 (L,)} from streams of token ids.

    With a separator, examples also contain {"segments": int32 (L,), "positions": int32 (L,)}.

    Windows are views: reading examples copies only their tokens, from memory or from a memory map.

    Args:
        streams: The streams that windows are cut from; a window does not span two streams.
        length: Tokens per example, L.
        vocabulary: Every id read must be below it; None if all ids are known to be valid.
        separator: The id that ends a document, to keep documents apart; None: not packed.
    """

    def __init__(
        self, streams: Sequence[Document], length: int, vocabulary: int | None = None, separator: int | None = None
    ) -> None:
        streams = [stream for stream in streams if len(stream.ids) > length]
        self._names = [stream.name for stream in streams]
        self._files = MappedFiles.of_arrays(stream.ids for stream in streams)
        self._windows = [sliding_window_view(stream.ids, length + 1)[::length] for stream in streams]
        self._starts = np.cumsum([0, *(len(windows) for windows in self._windows)])
        self._length = length
        self._vocabulary = vocabulary
        self._separator = separator

    def __len__(self) -> int:
        """Returns the number of whole windows in all streams."""
        return int(self._starts[-1])

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the examples at `indices` (int64, (N,)), stacked: arrays of shape (N, L).

        Raises:
            BadDataError: A token id is outside the vocabulary, or a mapped file was cut.
        """
        self._files.check()
        ids = np.empty((len(indices), self._length + 1), np.int32)
        of_stream, places = find_part(self._starts, indices)
        for stream in np.unique(of_stream):
            chosen = of_stream == stream
            windows = self._windows[stream][places[chosen]]
            self._check(windows, int(stream), indices[chosen])
            ids[chosen] = windows
        inputs, targets = np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])
        if self._separator is not None:
            return {"inputs": inputs, "targets": targets, **mark_documents(inputs, self._separator)}
        return {"inputs": inputs, "targets": targets, "weights": np.ones(inputs.shape, np.float32)}

    def origin(self, index: int) -> str:
        """Returns the stream and the first token of example `index`, for messages."""
        stream, place = find_part(self._starts, index)
        return f"{self._names[stream]}, from token {place * self._length:,}"

    def _check(self, ids: np.ndarray, stream: int, indices: np.ndarray) -> None:
        """Raises a BadDataError if an id is outside the vocabulary."""
        if self._vocabulary is None or (ids.max() < self._vocabulary and ids.min() >= 0):
            return
        wrong = ids.argmax() if ids.max() >= self._vocabulary else ids.argmin()
        row, column = np.unravel_index(wrong, ids.shape)
        place = (int(indices[row]) - int(self._starts[stream])) * self._length + int(column)
        raise BadDataError(
            f"{self._names[stream]} contains token id {ids[row, column]}; data.vocabulary={self._vocabulary} allows 0 "
            f".. {self._vocabulary - 1}. It is token {place:,} of this split's part of the file, in example "
            f"{indices[row]:,}. Raise data.vocabulary (0 finds it), or check data.dtype (a wrong one reads noise)."
        )
