"""Examples of different lengths: every batch has one length, out of a few lengths.

    lengths 64, 128, 256      step      0    1    2    3    4   ...
                              batch    64  128   64  256   64   ...   every row padded to it, with weights of 0

A batch contains rows of one bucket, padded to the bucket's length, so a step is compiled only once for each bucket. The
bucket of a step follows from the number of the step alone (see `shares`), so it is the same on every mesh and in every
process. Each bucket is shuffled in its own epochs, and has as large a share of the batches as of the examples: all
examples are seen equally often.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...mesh.errors import UserError
from ..shares import MAX_PERIOD, locate
from ..source import BatchedSource, Source, Splits, fingerprint, origin_of, stack_examples
from .order import part_seed, sample_order

MULTIPLE = 8
"""Computed lengths are multiples of it."""


class BucketedSource(BatchedSource):
    """Examples padded to the longest bucket; `in_batches` gives those of training, each padded to its own bucket.

    Args:
        source: Examples with different numbers of rows on dim 0.
        sizes: int64, (len(source),), the length of each.
        lengths: The lengths of the buckets, ascending; every bucket has examples.
        padded: Names of the arrays to pad, with "weights".
    """

    def __init__(self, source: Source, sizes: np.ndarray, lengths: Sequence[int], padded: Sequence[str]) -> None:
        self._source = source
        self._sizes = sizes
        self._padded = tuple(padded)
        self.lengths = np.array(lengths)
        self.bucket_of = np.searchsorted(self.lengths, sizes)

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(self._source)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the examples at `indices` (int64, (N,)), stacked on dim 0, padded to the longest bucket."""
        return self.stack(indices, int(self.lengths[-1]))

    def in_batches(self, global_batch: int) -> "BucketedBatches":
        """Returns the same examples in the order of training, every batch from one bucket.

        Args:
            global_batch: Rows of a batch, over all processes.
        """
        return BucketedBatches(self, global_batch)

    def origin(self, index: int) -> str:
        """Returns the origin of example `index`, or "" if its source does not know it."""
        return origin_of(self._source, index)

    def stack(self, indices: np.ndarray, length: int) -> dict[str, np.ndarray]:
        """Returns examples padded to one length, stacked on dim 0."""
        examples = [self.padded_to(length, int(index)) for index in indices]
        return stack_examples(examples, self._source, indices)

    def padded_to(self, length: int, index: int) -> dict[str, np.ndarray]:
        """Returns one example, padded to a length."""
        example = dict(self._source[index])
        for name in self._padded:
            array = np.asarray(example[name])
            if not array.ndim or len(array) != self._sizes[index]:
                raise UserError(
                    f"example {index}: {name} has the shape {array.shape}, but its length is {self._sizes[index]}; "
                    "padded arrays must have as many rows as inputs. Name them in bucket_by_length(padded=[...])."
                )
            added = [(0, 0)] * array.ndim
            added[0] = (0, length - len(array))
            example[name] = np.pad(array, added)
        return example


class BucketedBatches(BucketedSource):
    """The examples of a `BucketedSource` in the order of training, each padded to its own bucket.

    Args:
        source: The examples.
        global_batch: Rows of a batch, over all processes.
    """

    def __init__(self, source: BucketedSource, global_batch: int) -> None:
        super().__init__(source._source, source._sizes, source.lengths.tolist(), source._padded)
        self._global_batch = global_batch
        self._members = [np.flatnonzero(source.bucket_of == number) for number in range(len(source.lengths))]
        self._weights = _shares([len(members) for members in self._members])

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the examples at `indices` (int64, (N,)), padded to the longest of their buckets; a batch has one."""
        return self.stack(indices, int(self.lengths[self.bucket_of[indices].max()]))

    def order(self, samples: np.ndarray, *, seed: int, shuffle: bool) -> np.ndarray:
        """Returns the example of each sample of a run.

        Args:
            samples: int64, (N,), global sample indices, >= 0.
            seed: Selects the order within the buckets, >= 0.
            shuffle: If false, each bucket has its own order.

        Returns:
            int64, (N,), indices into this source.
        """
        steps, rows = np.divmod(samples, self._global_batch)
        buckets, numbers = locate(steps, self._weights)
        examples = np.empty_like(samples)
        for bucket in np.unique(buckets):
            is_of_bucket = buckets == bucket
            members = self._members[bucket]
            places = sample_order(
                numbers[is_of_bucket] * self._global_batch + rows[is_of_bucket],
                num_examples=len(members),
                seed=part_seed(seed, int(bucket)),
                shuffle=shuffle,
            )
            examples[is_of_bucket] = members[places]
        return examples

    def length_of(self, steps: np.ndarray) -> np.ndarray:
        """Returns the length of the batch of each step (int64, (N,))."""
        buckets, _ = locate(steps, self._weights)
        return self.lengths[buckets]


def bucket_by_length(
    splits: Splits,
    *,
    lengths: Sequence[int] | None = None,
    buckets: int = 4,
    padded: Sequence[str] | None = None,
) -> Splits:
    """Pads examples of different lengths, so that a batch has one of a few lengths.

    Args:
        splits: Examples whose "inputs" have different numbers of rows on dim 0; every example is read once, for its
            length. "weights" need a row for each row of "inputs" too: padding gets 0.
        lengths: The lengths of the buckets. None: computed, so that each has about as many examples.
        buckets: The maximum number of computed lengths, which are multiples of 8.
        padded: Names of the arrays to pad. None: those of the first example that are as long as its inputs.

    Returns:
        Splits whose training batches come from one bucket each; held-out examples are padded to the longest.

    Raises:
        UserError: An example is longer than the longest bucket or has no rows, or weights are not per row.
    """
    held_out = splits.evaluation
    sizes = [_sizes(splits.train)]
    if held_out is not None:
        sizes.append(_sizes(held_out))
    all_sizes = np.concatenate(sizes)
    if lengths is None:
        lengths = _computed_lengths(all_sizes, buckets)
    sorted_lengths = sorted(set(lengths))
    longest = int(all_sizes.max())
    if not sorted_lengths or sorted_lengths[0] < 1 or longest > sorted_lengths[-1]:
        raise UserError(f"lengths={list(lengths)} must be at least 1 and reach the {longest:,} rows of the longest.")
    names = tuple(_as_long_as_inputs(splits.train[0]) if padded is None else padded)
    if "weights" not in names:
        raise UserError(
            f"examples have weights of the shape {np.shape(splits.train[0]['weights'])}: padding gets weights of 0, so "
            "each row of inputs must have one. Give such weights."
        )
    used_buckets = np.unique(np.searchsorted(sorted_lengths, sizes[0]))
    used = [sorted_lengths[bucket] for bucket in used_buckets]
    train = BucketedSource(splits.train, sizes[0], used, names)
    evaluation = None
    if held_out is not None:
        longest_bucket = max(used[-1], sorted_lengths[np.searchsorted(sorted_lengths, longest)])
        evaluation = BucketedSource(held_out, sizes[1], [longest_bucket], names)
    padding = 1 - int(sizes[0].sum()) / int(train.lengths[train.bucket_of].sum())
    return splits._replace(
        train=train,
        evaluation=evaluation,
        description=f"{splits.description}, in buckets of {', '.join(map(str, used))} ({padding:.0%} padding)",
        fingerprint=splits.fingerprint and fingerprint(sizes, splits.fingerprint, used, names),
    )


def _computed_lengths(sizes: np.ndarray, buckets: int) -> list[int]:
    """Returns lengths of buckets that each have about as many examples."""
    quantiles = np.quantile(sizes, np.arange(1, buckets + 1) / buckets)
    return (np.ceil(quantiles / MULTIPLE) * MULTIPLE).astype(int).tolist()


def _as_long_as_inputs(example: Mapping[str, Any]) -> list[str]:
    """Returns the names of the arrays that have as many rows as the inputs."""
    rows = np.shape(example["inputs"])[:1]
    return [name for name, array in example.items() if np.shape(array)[:1] == rows]


def _sizes(source: Source) -> np.ndarray:
    """Returns the length of each example."""
    sizes = np.array([len(np.atleast_1d(source[index]["inputs"])) for index in range(len(source))], np.int64)
    if not sizes.all():
        raise UserError(f"example {int(sizes.argmin())} has inputs without rows; leave it out.")
    return sizes


def _shares(counts: Sequence[int]) -> tuple[int, ...]:
    """Returns integer weights in the ratio of counts, rounded if their sum would exceed the maximum period."""
    divisor = math.gcd(*counts)
    if sum(counts) // divisor <= MAX_PERIOD:
        return tuple(count // divisor for count in counts)
    scale = (MAX_PERIOD - len(counts)) / sum(counts)
    return tuple(max(1, round(count * scale)) for count in counts)
