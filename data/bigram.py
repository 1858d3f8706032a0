"""The loss of a bigram model: what a language model must beat to have learned more than which token follows which.

The model is p(b | a) = (count(a, b) + s * p(b)) / (count(a) + s), where p(b) is the share of token b (with one added
to each count). s, the smoothing, spreads s pseudo-counts over the successors of each token in proportion to how
frequent they are, which is stronger than adding the same to all.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .source import Source, take

SMOOTHINGS = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
TOKENS_PER_READ = 1 << 18
MAX_TRAIN_TOKENS = 1 << 28
DENSE_VOCABULARY = 2048


class PairCounts(NamedTuple):
    """How often each pair of successive tokens occurs; pairs are a * vocabulary + b, sorted, each once."""

    pairs: np.ndarray
    counts: np.ndarray


def bigram_loss(
    train: Source,
    evaluation: Source,
    vocabulary: int,
    smoothing: float | None = None,
    *,
    max_examples: int | None = None,
) -> float:
    """Loss of a bigram model fitted on one split, on the windows of another.

    Args:
        train: Examples with "inputs", "targets" and "weights", (L,) each. Of more than 2**28 tokens, evenly
            spread windows are used.
        evaluation: The examples the loss is measured on, each target counted with its weight.
        vocabulary: Number of token ids.
        smoothing: Pseudo-counts per token, > 0; None for the best of 0.01, 0.1, 1, ..., 1000, chosen by fitting on nine
            tenths of the training windows and measuring on the last tenth (1 where there are fewer than ten).
        max_examples: Measure on the first so many examples only, as an evaluation of few batches does; None: on all.

    Returns:
        Nats per token.
    """
    windows = np.arange(0, len(train), _stride(train))
    last_tenth = len(windows) - len(windows) // 10
    fitted = _count_pairs(train, windows[:last_tenth], vocabulary)
    tuning = _count_pairs(train, windows[last_tenth:], vocabulary)
    if smoothing is None and len(tuning.pairs):
        smoothing = min(SMOOTHINGS, key=lambda value: _loss(fitted, tuning, vocabulary, value))
    num_examples = len(evaluation) if max_examples is None else min(len(evaluation), max_examples)
    measured = _count_pairs(evaluation, np.arange(num_examples), vocabulary)
    return _loss(_merge([fitted, tuning]), measured, vocabulary, smoothing or 1.0)


def _stride(train: Source) -> int:
    """1, or more where the split holds more tokens than are read."""
    num_tokens = len(train) * len(train[0]["inputs"])
    return -(-num_tokens // MAX_TRAIN_TOKENS)


def _count_pairs(source: Source, windows: np.ndarray, vocabulary: int) -> PairCounts:
    """Weighted counts of (input, target) in the given windows of a source."""
    if vocabulary > DENSE_VOCABULARY:
        return _merge([_unique(pairs, weights) for pairs, weights in _read_pairs(source, windows, vocabulary)])
    counts = np.zeros(vocabulary**2)
    for pairs, weights in _read_pairs(source, windows, vocabulary):
        counts += np.bincount(pairs, weights, minlength=vocabulary**2)
    pairs = np.flatnonzero(counts)
    return PairCounts(pairs, counts[pairs])


def _read_pairs(source: Source, windows: np.ndarray, vocabulary: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The pairs and weights of the windows, some windows at a time."""
    per_read = max(1, TOKENS_PER_READ // len(source[0]["inputs"]))
    for start in range(0, len(windows), per_read):
        batch = take(source, windows[start : start + per_read])
        pairs = batch["inputs"].astype(np.int64) * vocabulary + batch["targets"]
        yield pairs.ravel(), batch["weights"].ravel()


def _unique(pairs: np.ndarray, weights: np.ndarray) -> PairCounts:
    """Sums the weights of equal pairs."""
    unique, place = np.unique(pairs, return_inverse=True)
    return PairCounts(unique, np.bincount(place, weights, minlength=len(unique)))


def _merge(parts: list[PairCounts]) -> PairCounts:
    """Adds up counts, two by two."""
    while len(parts) > 1:
        couples = [parts[i : i + 2] for i in range(0, len(parts), 2)]
        parts = [_unique(*map(np.concatenate, zip(*couple, strict=True))) for couple in couples]
    return parts[0] if parts else PairCounts(np.zeros(0, np.int64), np.zeros(0))


def _loss(fitted: PairCounts, measured: PairCounts, vocabulary: int, smoothing: float) -> float:
    """Mean of -log p(b | a) over the measured pairs, with p from the fitted counts."""
    of_first = np.bincount(fitted.pairs // vocabulary, fitted.counts, minlength=vocabulary)
    of_second = np.bincount(fitted.pairs % vocabulary, fitted.counts, minlength=vocabulary) + 1.0
    share = of_second / of_second.sum()
    place = np.minimum(np.searchsorted(fitted.pairs, measured.pairs), len(fitted.pairs) - 1)
    count = np.where(fitted.pairs[place] == measured.pairs, fitted.counts[place], 0.0)
    first, second = np.divmod(measured.pairs, vocabulary)
    probability = (count + smoothing * share[second]) / (of_first[first] + smoothing)
    return float(-(measured.counts * np.log(probability)).sum() / measured.counts.sum())
