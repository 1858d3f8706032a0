"""The loss of a bigram model: the baseline for a language model, which must beat it to use more than one token.

The model is p(b | a) = (count(a, b) + s * p(b)) / (count(a) + s), where p(b) is the share of token b (with one added
to each count). s, the smoothing, spreads s pseudo-counts over the successors of each token in proportion to their
frequency, which is a stronger baseline than adding the same to all.
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
    """Counts of pairs of successive tokens; pairs are a * vocabulary + b, sorted, each once."""

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
    """Returns the loss, on the windows of one split, of a bigram model fitted on another.

    Args:
        train: Examples with "inputs", "targets" and "weights", (L,) each. If there are more than 2**28 tokens,
            evenly spread windows are used.
        evaluation: The examples to measure the loss on; each target counts with its weight.
        vocabulary: Number of token ids.
        smoothing: Pseudo-counts per token, > 0; None for the best of 0.01, 0.1, 1, ..., 1000, chosen by fitting on nine
            tenths of the training windows and measuring on the last tenth (1 if there are fewer than ten).
        max_examples: The number of examples to measure on, like an evaluation of few batches; None: all.

    Returns:
        Nats per token.
    """
    stride = -(-len(train) * len(train[0]["inputs"]) // MAX_TRAIN_TOKENS)
    windows = np.arange(0, len(train), stride)
    last_tenth = len(windows) - len(windows) // 10
    fitted = _count_pairs(train, windows[:last_tenth], vocabulary)
    tuning = _count_pairs(train, windows[last_tenth:], vocabulary)
    if smoothing is None and len(tuning.pairs):
        smoothing = min(SMOOTHINGS, key=lambda value: _loss(fitted, tuning, vocabulary, value))
    num_examples = len(evaluation) if max_examples is None else min(len(evaluation), max_examples)
    measured = _count_pairs(evaluation, np.arange(num_examples), vocabulary)
    return _loss(_merge([fitted, tuning]), measured, vocabulary, smoothing or 1.0)


def _count_pairs(source: Source, windows: np.ndarray, vocabulary: int) -> PairCounts:
    """Returns weighted counts of (input, target) in windows of a source."""
    if vocabulary > DENSE_VOCABULARY:
        return _merge([_unique(pairs, weights) for pairs, weights in _read_pairs(source, windows, vocabulary)])
    counts = np.zeros(vocabulary**2)
    for pairs, weights in _read_pairs(source, windows, vocabulary):
        counts += np.bincount(pairs, weights, minlength=vocabulary**2)
    pairs = np.flatnonzero(counts)
    return PairCounts(pairs, counts[pairs])


def _read_pairs(source: Source, windows: np.ndarray, vocabulary: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the pairs and weights of some windows at a time."""
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
    """Adds up counts."""
    return _unique(*map(np.concatenate, zip((np.zeros(0, np.int64), np.zeros(0)), *parts, strict=True)))


def _loss(fitted: PairCounts, measured: PairCounts, vocabulary: int, smoothing: float) -> float:
    """Returns the mean of -log p(b | a) over the measured pairs, with p from the fitted counts."""
    of_first = np.bincount(fitted.pairs // vocabulary, fitted.counts, minlength=vocabulary)
    of_second = np.bincount(fitted.pairs % vocabulary, fitted.counts, minlength=vocabulary) + 1.0
    share = of_second / of_second.sum()
    place = np.minimum(np.searchsorted(fitted.pairs, measured.pairs), len(fitted.pairs) - 1)
    count = np.where(fitted.pairs[place] == measured.pairs, fitted.counts[place], 0.0)
    first, second = np.divmod(measured.pairs, vocabulary)
    probability = (count + smoothing * share[second]) / (of_first[first] + smoothing)
    return float(-(measured.counts * np.log(probability)).sum() / measured.counts.sum())
