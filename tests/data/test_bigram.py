"""The bigram loss against a slow reference and against known distributions."""

import math
from collections import Counter

import numpy as np
import pytest
import spmdkit.data.bigram as bigram
from spmdkit.data import bigram_loss, from_arrays
from spmdkit.data.sources.texts import Stream
from spmdkit.data.windows import WindowSource


def windows(ids, length=16):
    return WindowSource([Stream("s", np.asarray(ids, np.uint16))], length)


def markov(size, seed=0, vocabulary=7):
    """Tokens that follow each other with known probabilities, and their entropy rate."""
    transitions = np.random.default_rng(1).dirichlet(np.ones(vocabulary), size=vocabulary)
    random = np.random.default_rng(seed)
    ids = [0]
    for number in random.random(size - 1):
        ids.append(int(np.searchsorted(transitions[ids[-1]].cumsum(), number)))
    entropies = -(transitions * np.log(transitions)).sum(axis=1)
    return ids, entropies[ids].mean()


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


@pytest.mark.parametrize("smoothing", [0.01, 1.0, 50.0])
@pytest.mark.parametrize("dense", [True, False])
def test_equals_a_slow_reference(monkeypatch, smoothing, dense):
    monkeypatch.setattr(bigram, "DENSE_VOCABULARY", 100 if dense else 0)
    monkeypatch.setattr(bigram, "TOKENS_PER_READ", 160)
    train, evaluation = windows([9, *markov(2000)[0]]), windows([*markov(300, seed=5)[0], 8, 9, 8, 8] * 2)
    expected = slow_bigram_loss(train, evaluation, 10, smoothing)
    assert bigram_loss(train, evaluation, 10, smoothing) == pytest.approx(expected, rel=1e-12)


def test_counts_pairs_with_their_weights():
    ids = np.array(markov(330)[0], np.int32).reshape(10, 33)
    weights = np.random.default_rng(0).integers(0, 2, size=(10, 32)).astype(np.float32)
    weighted = from_arrays({"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": weights}).train
    train = windows(markov(2000)[0])
    assert bigram_loss(train, weighted, 7, 1.0) == pytest.approx(slow_bigram_loss(train, weighted, 7, 1.0), rel=1e-12)


def test_reaches_the_entropy_of_a_markov_chain():
    ids, entropy = markov(60_000)
    assert bigram_loss(windows(ids[:50_000]), windows(ids[50_000:]), 7) == pytest.approx(entropy, rel=0.02)


def test_chosen_smoothing_is_close_to_the_best():
    ids, _ = markov(8000, vocabulary=50)
    train, evaluation = windows(ids[:4000]), windows(ids[4000:])
    losses = [bigram_loss(train, evaluation, 50, smoothing) for smoothing in bigram.SMOOTHINGS]
    assert min(losses) <= bigram_loss(train, evaluation, 50) <= min(losses) * 1.01 < max(losses) * 0.9


def test_fits_few_windows_without_tuning():
    assert 0 < bigram_loss(windows([1, 2] * 10), windows([1, 2] * 10), 3) < 1


def test_reads_evenly_spread_windows_of_large_splits(monkeypatch):
    monkeypatch.setattr(bigram, "MAX_TRAIN_TOKENS", 700)
    train, evaluation = windows(markov(2000)[0]), windows(markov(300, seed=5)[0])
    every_third = [train[index] for index in range(0, len(train), 3)]
    expected = slow_bigram_loss(every_third, evaluation, 7, 1.0)
    assert bigram_loss(train, evaluation, 7, 1.0) == pytest.approx(expected, rel=1e-12)


def test_measures_only_the_first_examples():
    random = np.random.default_rng(0)
    tokens = random.integers(0, 5, 4001)
    windows = {"inputs": tokens[:-1].reshape(-1, 8), "targets": tokens[1:].reshape(-1, 8)}
    windows["weights"] = np.ones_like(windows["inputs"], np.float32)
    source = from_arrays(windows).train
    few = from_arrays({name: array[:3] for name, array in windows.items()}).train
    assert bigram_loss(source, source, 5, 1.0, max_examples=3) == bigram_loss(source, few, 5, 1.0)
    assert bigram_loss(source, source, 5, 1.0, max_examples=10**6) == bigram_loss(source, source, 5, 1.0)
