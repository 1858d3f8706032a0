"""The first batch of a run, kept until the metrics of its step are known: its ranges explain a loss that is not finite.

Nothing was updated before the first step, so its loss depends only on `init`, the loss function and the batch.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...parallel.model import Batch
from ...parallel.model.user_errors import user_items
from .late_log import RUN_AHEAD
from .not_finite import Diverged

KEPT = RUN_AHEAD + 2
"""Steps after which the metrics of the first one were read."""
FIRST_STEP = 1


class FirstBatch:
    """Passes on batches and keeps the first one for a few steps."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        """Reads nothing yet.

        Args:
            batches: Global batches, in order.
        """
        self._batches = batches
        self._first: Batch | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Yields the batches."""
        for number, batch in enumerate(user_items("reading the batches", lambda: self._batches), 1):
            if number == 1:
                self._first = batch
            if number > KEPT:
                self._first = None
            yield batch

    def explain(self, error: Diverged) -> Diverged:
        """Returns the error of the first step with the ranges of its batch; another error unchanged."""
        if error.step != FIRST_STEP or self._first is None:
            return error
        return Diverged(error.step, error.found, f"{error.advice} Its batch: {describe_ranges(self._first)}.")


def describe_ranges(batch: Mapping[str, Any]) -> str:
    """Returns the smallest and the largest value of each array of a batch that this process holds.

    Args:
        batch: Name -> global array (rows, ...).
    """
    return "; ".join(f"{name} {_range(array)}" for name, array in batch.items() if name != "example")


def _range(array: Any) -> str:
    """Formats a dtype and a range: "int32 from 0 to 15", "float32 from -2.1 to 3 (4 not finite)"."""
    parts = [shard.data for shard in array.addressable_shards] if isinstance(array, jax.Array) else [array]
    values = np.concatenate([np.asarray(part).ravel() for part in parts])
    if not jnp.issubdtype(values.dtype, jnp.floating):
        return f"{values.dtype} from {values.min()} to {values.max()}"
    values = values.astype(np.float64)
    finite = values[np.isfinite(values)]
    count = values.size - finite.size
    others = f" ({count:,} not finite)" if count else ""
    if not finite.size:
        return f"{array.dtype}, all not finite"
    return f"{array.dtype} from {finite.min():.4g} to {finite.max():.4g}{others}"
