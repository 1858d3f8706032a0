"""Examples of different lengths: batches of one length each, of a few lengths in all.

    lengths 64, 128, 256      step      0    1    2    3    4   ...
                              batch    64  128   64  256   64   ...   every row padded to it, with weights of 0

A batch holds rows of one bucket, padded to the bucket's length, so a step is compiled once for each bucket and never
again. Which bucket a step is of follows from the number of the step alone (see `shares`), so it is the same on every
mesh and in every process. Each bucket is shuffled in epochs of its own, and has as large a share of the batches as it
has of the examples: all examples are seen equally often.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...mesh.errors import UserError
from ..source import Source, Splits, fingerprint
from .order import sample_order
from .shares import LONGEST_PERIOD, locate


class BucketedSource:
    """Examples padded to the longest bucket; `in_batches` gives those of training, each padded to its own bucket.

    Args:
        source: Examples whose arrays have different numbers of rows on dim 0.
        sizes: int64, (len(source),), the length of each.
        lengths: Of the buckets, ascending; none is without examples.
        padded: Names of the arrays that are padded, "weights" among them.
    """

    def __init__(self, source: Source, sizes: np.ndarray, lengths: Sequence[int], padded: Sequence[str]) -> None:
        self._source, self._sizes, self.lengths, self._padded = source, sizes, np.array(lengths), tuple(padded)
        self.bucket_of = np.searchsorted(self.lengths, sizes)

    def __len__(self) -> int:
        """Number of examples."""
        return len(self._source)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Example `index`, padded to the longest bucket."""
        return self.padded_to(int(self.lengths[-1]), index)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The examples at `indices` (int64, (N,)), stacked on dim 0, padded to the longest bucket."""
        return self.stacked(indices, int(self.lengths[-1]))

    def in_batches(self, global_batch: int) -> "BucketedBatches":
        """The same examples in the order of training, every batch of one bucket.

        Args:
            global_batch: Rows of a batch, over all processes.
        """
        return BucketedBatches(self, global_batch)

    def origin(self, index: int) -> str:
        """Where example `index` comes from, as far as its source can tell."""
        origin = getattr(self._source, "origin", None)
        return origin(index) if origin is not None else ""

    def stacked(self, indices: np.ndarray, length: int) -> dict[str, np.ndarray]:
        """Examples padded to one length, stacked on dim 0."""
        examples = [self.padded_to(length, int(index)) for index in indices]
        return {name: np.stack([example[name] for example in examples]) for name in examples[0]}

    def padded_to(self, length: int, index: int) -> dict[str, np.ndarray]:
        """One example, padded."""
        example = dict(self._source[index])
        for name in self._padded:
            array = np.asarray(example[name])
            if not array.ndim or len(array) != self._sizes[index]:
                raise UserError(
                    f"example {index}: {name} has the shape {array.shape}, and its length is {self._sizes[index]}; "
                    "what is padded has as many rows as inputs. Name what is padded in bucket_by_length(padded=[...])."
                )
            rest = [(0, 0)] * (array.ndim - 1)
            example[name] = np.pad(array, [(0, length - len(array)), *rest])
        return example


class BucketedBatches:
    """The examples of a `BucketedSource` in the order of training: see there."""

    def __init__(self, source: BucketedSource, global_batch: int) -> None:
        self._source, self._global_batch = source, global_batch
        self._members = [np.flatnonzero(source.bucket_of == number) for number in range(len(source.lengths))]
        self._weights = _shares([len(each) for each in self._members])
        self.arrays_in_memory: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        """Number of examples."""
        return len(self._source)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Example `index`, padded to its bucket."""
        return {name: rows[0] for name, rows in self.take(np.array([index])).items()}

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The examples at `indices` (int64, (N,)), padded to the longest of their buckets: in a batch they have one."""
        bucket = int(self._source.bucket_of[indices].max())
        return self._source.stacked(indices, int(self._source.lengths[bucket]))

    def order(self, samples: np.ndarray, *, seed: int, shuffle: bool) -> np.ndarray:
        """Which example each sample of a run is.

        Args:
            samples: int64, (N,), global sample indices, >= 0.
            seed: Chooses the order within the buckets, >= 0.
            shuffle: False for each bucket's own order.

        Returns:
            int64, (N,), indices into this source.
        """
        steps, rows = np.divmod(samples, self._global_batch)
        buckets, numbers = locate(steps, self._weights)
        examples = np.empty_like(samples)
        for bucket in np.unique(buckets):
            chosen, members = buckets == bucket, self._members[bucket]
            within = numbers[chosen] * self._global_batch + rows[chosen]
            places = sample_order(within, num_examples=len(members), seed=_seed_of(seed, int(bucket)), shuffle=shuffle)
            examples[chosen] = members[places]
        return examples

    def length_of(self, steps: np.ndarray) -> np.ndarray:
        """The length of the batch of each step (int64, (N,), steps before it)."""
        buckets, _ = locate(steps, self._weights)
        return self._source.lengths[buckets]

    def origin(self, index: int) -> str:
        """Where example `index` comes from, as far as its source can tell."""
        return self._source.origin(index)


def bucket_by_length(
    splits: Splits,
    *,
    lengths: Sequence[int] | None = None,
    buckets: int = 4,
    multiple: int = 8,
    padded: Sequence[str] | None = None,
) -> Splits:
    """Pads examples of different lengths, so that a batch has one of a few lengths.

    Args:
        splits: Examples whose "inputs" have different numbers of rows on dim 0; every example is read once, for its
            length. "weights" have a row for each row of "inputs" too: 0 is what padding gets.
        lengths: Of the buckets. None: those with the least padding are computed.
        buckets: How many lengths are computed at most.
        multiple: Of which computed lengths are multiples.
        padded: Names of the arrays that are padded. None: those of the first example that are as long as its inputs.

    Returns:
        Splits whose training batches are of one bucket each; held-out examples are padded to the longest.

    Raises:
        UserError: an example is longer than the longest bucket, has no rows, or its weights are not those of rows.
    """
    held_out = splits.evaluation
    sizes = [_sizes(source) for source in (splits.train, held_out) if source is not None]
    if lengths is None:
        lengths = least_padding(np.concatenate(sizes), buckets, multiple)
    asked = sorted(set(lengths))
    longest = max(int(each.max()) for each in sizes)
    if not asked or asked[0] < 1 or longest > asked[-1]:
        raise UserError(
            f"lengths={list(lengths)}: the longest example has {longest:,} rows of inputs. Give a bucket of at least "
            "that, all of at least 1, or cut the examples."
        )
    names = tuple(padded) if padded is not None else _as_long(splits.train[0])
    if "weights" not in names:
        raise UserError(
            "examples have weights of the shape "
            f"{np.shape(splits.train[0]['weights'])}: padding gets weights of 0, so there has to be one for each row "
            "of inputs. Give such weights."
        )
    used = [length for length in asked if (np.searchsorted(asked, sizes[0]) == asked.index(length)).any()]
    fits = [length for length in used if length >= longest] or [*used, asked[np.searchsorted(asked, longest)]]
    train = BucketedSource(splits.train, sizes[0], used, names)
    evaluation = None if held_out is None else BucketedSource(held_out, sizes[1], fits[-1:], names)
    share = sum(int(each.sum()) for each in sizes[:1]) / int(train.lengths[train.bucket_of].sum())
    return splits._replace(
        train=train,
        evaluation=evaluation,
        description=f"{splits.description}, in buckets of {', '.join(map(str, used))} ({1 - share:.0%} padding)",
        fingerprint=splits.fingerprint and fingerprint(sizes, splits.fingerprint, used, names),
    )


def least_padding(sizes: np.ndarray, buckets: int, multiple: int) -> list[int]:
    """The lengths with which the least is padded.

    Args:
        sizes: int64, the lengths of examples.
        buckets: How many lengths at most.
        multiple: Of which lengths are multiples.
    """
    tops, counts = np.unique(-(-sizes // multiple) * multiple, return_counts=True)
    before = np.concatenate([[0], np.cumsum(counts)])
    best = np.full(len(tops) + 1, np.inf)  # the least total length of the first so many kinds
    best[0] = 0
    cuts: list[np.ndarray] = []
    for _ in range(min(buckets, len(tops))):
        cost = best[:-1, None] + (before[None, 1:] - before[:-1, None]) * tops[None, :]
        cost[np.arange(len(tops))[:, None] > np.arange(len(tops))[None, :]] = np.inf
        cuts.append(cost.argmin(0))
        best = np.concatenate([[np.inf], cost.min(0)])
        best[0] = 0 if not cuts else np.inf
    found, end = [], len(tops)
    for cut in reversed(cuts):
        found.append(int(tops[end - 1]))
        end = int(cut[end - 1])
        if not end:
            break
    return sorted(found)


def _sizes(source: Source) -> np.ndarray:
    """The length of each example."""
    found = np.array([len(np.atleast_1d(source[index]["inputs"])) for index in range(len(source))], np.int64)
    if not found.all():
        raise UserError(f"example {int(found.argmin())} has inputs without rows; leave it out.")
    return found


def _as_long(example: dict[str, Any]) -> tuple[str, ...]:
    """Names of the arrays that have as many rows as inputs."""
    rows = np.shape(example["inputs"])[:1]
    return tuple(name for name, array in example.items() if np.shape(array)[:1] == rows)


def _shares(counts: Sequence[int]) -> tuple[int, ...]:
    """Whole weights in the ratio of counts; of very many, rounded so that they add up to about the longest period."""
    divisor = math.gcd(*counts)
    if sum(counts) // divisor <= LONGEST_PERIOD:
        return tuple(count // divisor for count in counts)
    scale = (LONGEST_PERIOD - len(counts)) / sum(counts)
    return tuple(max(1, round(count * scale)) for count in counts)


@functools.lru_cache(maxsize=64)
def _seed_of(seed: int, bucket: int) -> int:
    """A seed for each bucket."""
    return int(np.random.SeedSequence([seed, bucket]).generate_state(1, np.uint64)[0])
