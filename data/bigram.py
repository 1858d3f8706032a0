"""The loss of a bigram model: the baseline for a language model, which must beat it to use more than one token.

The model is p(b | a) = (count(a, b) + s * p(b)) / (count(a) + s), where p(b) is the share of token b (with one added
to each count). s, the smoothing, spreads s pseudo-counts over the successors of each token in proportion to their
frequency, which is a stronger baseline than adding the same to all.
"""

import numpy as np

from .source import Source, take

SMOOTHINGS = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
TOKENS_PER_READ = 1 << 18
MAX_TRAIN_TOKENS = 1 << 28


def bigram_loss(train: Source, evaluation: Source, vocabulary: int, *, max_examples: int | None = None) -> float:
    """Returns the loss, on the windows of one split, of a bigram model fitted on another.

    The smoothing is the best of 0.01, 0.1, 1, ..., 1000, chosen by fitting on nine tenths of the training windows and
    measuring on the last tenth (1 if there are fewer than ten).

    Args:
        train: Examples with "inputs", "targets" and "weights", (L,) each. If there are more than 2**28 tokens,
            evenly spread windows are used.
        evaluation: The examples to measure the loss on; each target counts with its weight.
        vocabulary: Number of token ids, at most a few thousand: the counts of all pairs are in memory.
        max_examples: The number of examples to measure on, like an evaluation of few batches; None: all.

    Returns:
        Nats per token.
    """
    stride = -(-len(train) * len(train[0]["inputs"]) // MAX_TRAIN_TOKENS)
    windows = np.arange(0, len(train), stride)
    parts = np.split(windows, [len(windows) - len(windows) // 10])
    fitted = _count_pairs(train, parts[0], vocabulary)
    tuning = _count_pairs(train, parts[1], vocabulary)
    smoothing = 1.0
    if tuning.any():
        smoothing = min(SMOOTHINGS, key=lambda candidate: _loss(fitted, tuning, candidate))
    measured = _count_pairs(evaluation, np.arange(len(evaluation))[:max_examples], vocabulary)
    return _loss(fitted + tuning, measured, smoothing)


def _count_pairs(source: Source, windows: np.ndarray, vocabulary: int) -> np.ndarray:
    """Returns weighted counts of (input, target) in windows of a source: float64, (vocabulary, vocabulary)."""
    counts = np.zeros(vocabulary**2)
    per_read = max(1, TOKENS_PER_READ // len(source[0]["inputs"]))
    for start in range(0, len(windows), per_read):
        batch = take(source, windows[start : start + per_read])
        pairs = batch["inputs"].astype(np.int64) * vocabulary + batch["targets"]
        counts += np.bincount(pairs.ravel(), batch["weights"].ravel(), minlength=vocabulary**2)
    return counts.reshape(vocabulary, vocabulary)


def _loss(fitted: np.ndarray, measured: np.ndarray, smoothing: float) -> float:
    """Returns the mean of -log p(b | a) over the measured pairs, with p from the fitted counts."""
    share = fitted.sum(0) + 1.0
    probability = (fitted + smoothing * share / share.sum()) / (fitted.sum(1, keepdims=True) + smoothing)
    return float(-(measured * np.log(probability)).sum() / measured.sum())
