"""The bigram loss against a slow reference and against known distributions."""

import math
from collections import Counter

import numpy as np
import pytest
import spmdkit.data.bigram as bigram
from spmdkit.data import bigram_loss, from_arrays
from spmdkit.data.sources.texts import Document
from spmdkit.data.windows import WindowSource


def windows(ids, length=16):
    return WindowSource([Document(b"", np.asarray(ids, np.uint16), "s")], length)


def markov(size, seed=0, vocabulary=7):
    """Tokens that follow each other with known probabilities."""
    transitions = np.random.default_rng(1).dirichlet(np.ones(vocabulary), size=vocabulary)
    random = np.random.default_rng(seed)
    ids = [0]
    for number in random.random(size - 1):
        ids.append(int(np.searchsorted(transitions[ids[-1]].cumsum(), number)))
    return ids


def slow_bigram_loss(train, evaluation, vocabulary, smoothing):
    pairs, firsts, seconds = Counter(), Counter(), Counter(dict.fromkeys(range(vocabulary), 1.0))
    for i in range(len(train)):
        for a, b in zip(train[i]["inputs"].tolist(), train[i]["targets"].tolist(), strict=True):
            pairs[a, b] += 1
            firsts[a] += 1
            seconds[b] += 1
    total, weight = 0.0, 0.0
    for i in range(len(evaluation)):
        example = {name: values.tolist() for name, values in evaluation[i].items()}
        for a, b, w in zip(example["inputs"], example["targets"], example["weights"], strict=True):
            share = seconds[b] / sum(seconds.values())
            total -= w * math.log((pairs[a, b] + smoothing * share) / (firsts[a] + smoothing))
            weight += w
    return total / weight


@pytest.fixture(params=[0.01, 1.0, 50.0])
def smoothing(request, monkeypatch):
    monkeypatch.setattr(bigram, "SMOOTHINGS", (request.param,))
    return request.param


@pytest.mark.parametrize(("max_tokens", "step"), [(1 << 28, 1), (700, 3)])
def test_equals_a_slow_reference(max_tokens, step, monkeypatch, smoothing):
    """Of large splits, evenly spread windows are read."""
    monkeypatch.setattr(bigram, "TOKENS_PER_READ", 160)
    monkeypatch.setattr(bigram, "MAX_TRAIN_TOKENS", max_tokens)
    train, evaluation = windows([9, *markov(2000)]), windows([*markov(300, seed=5), 8, 9, 8, 8] * 2)
    expected = slow_bigram_loss([train[index] for index in range(0, len(train), step)], evaluation, 10, smoothing)
    assert bigram_loss(train, evaluation, 10) == pytest.approx(expected, rel=1e-12)


def test_counts_pairs_with_their_weights(smoothing):
    ids = np.array(markov(330), np.int32).reshape(10, 33)
    weights = np.random.default_rng(0).integers(0, 2, size=(10, 32)).astype(np.float32)
    weighted = from_arrays({"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": weights}).train
    train = windows(markov(2000))
    expected = slow_bigram_loss(train, weighted, 7, smoothing)
    assert bigram_loss(train, weighted, 7) == pytest.approx(expected, rel=1e-12)
    few = slow_bigram_loss(train, [weighted[index] for index in range(3)], 7, smoothing)
    assert bigram_loss(train, weighted, 7, max_examples=3) == pytest.approx(few, rel=1e-12)


def test_chosen_smoothing_is_close_to_the_best():
    ids = markov(8000, vocabulary=50)
    train, evaluation = windows(ids[:4000]), windows(ids[4000:])
    losses = [slow_bigram_loss(train, evaluation, 50, value) for value in bigram.SMOOTHINGS]
    assert min(losses) <= bigram_loss(train, evaluation, 50) <= min(losses) * 1.01 < max(losses) * 0.9


def test_fits_few_windows_without_tuning():
    train = windows([1, 2] * 10)
    assert bigram_loss(train, train, 3) == pytest.approx(slow_bigram_loss(train, train, 3, 1.0), rel=1e-12)
