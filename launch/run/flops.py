"""Model FLOP/s: operations of the model in the steps that were trained."""

import numpy as np

from ...data.ordering.buckets import BucketedSource
from ...data.ordering.order import batch_number
from ...data.source import Source
from ...parallel.model import BlockModel, Model


class FlopsOfSteps:
    """Operations of the model in a step, of batches as long as they were.

    Args:
        model: The model.
        source: Training examples.
        rows: Rows of a batch, over all processes.
        left_out: Numbers of the batches that no step gets.
    """

    def __init__(self, model: Model | BlockModel, source: Source, rows: int, *, left_out: tuple[int, ...] = ()) -> None:
        self._per_row, self._of_length, self._rows = model.flops_per_row, model.flops_of_length, rows
        self._left_out = left_out
        self._batches = source.in_batches(rows) if isinstance(source, BucketedSource) else None

    def __call__(self, start: int, stop: int) -> float | None:
        """The mean over the steps after `start` up to `stop`; None where the model does not tell."""
        if self._per_row is None or self._of_length is None or self._batches is None or stop <= start:
            return None if self._per_row is None else self._per_row * self._rows
        batches = np.array([batch_number(step, self._left_out) for step in range(start, stop)])
        lengths, times = np.unique(self._batches.length_of(batches), return_counts=True)
        each = [self._of_length(int(length)) for length in lengths]
        return self._rows * float(np.average(each, weights=times))
