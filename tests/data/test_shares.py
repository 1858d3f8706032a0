"""The sequence of parts: shares to within one sample at every moment, found without the samples before."""

from fractions import Fraction

import numpy as np
import pytest
from spmdkit.data.shares import locate, turns, whole_weights

RATIOS = [(1,), (7, 3), (1, 1, 1), (5, 3, 2), (1, 999), (97, 1, 1, 1), (3, 5, 7, 11, 13, 17), (400, *range(1, 30))]


@pytest.mark.parametrize("weights", RATIOS, ids=str)
def test_every_prefix_has_the_shares_to_within_one(weights):
    """Exact arithmetic over three periods: the bound is Tijdeman's, 1 - 1 / (2 * parts - 2)."""
    period = sum(weights)
    samples = np.arange(3 * period)
    parts, numbers = locate(samples, weights)
    given = np.cumsum(parts[:, None] == np.arange(len(weights)), axis=0)
    off = np.abs(given * period - np.outer(samples + 1, weights)).max()
    assert Fraction(int(off), period) <= (1 - Fraction(1, 2 * len(weights) - 2) if len(weights) > 1 else 0)
    assert numbers.tolist() == [int(given[i, part]) - 1 for i, part in enumerate(parts)]


def test_a_sample_is_found_alone_and_far_away():
    weights = (5, 3, 2)
    together = locate(np.arange(1000), weights)
    order = np.random.default_rng(0).permutation(1000)
    assert all(np.array_equal(a[order], b) for a, b in zip(together, locate(order, weights), strict=True))
    part, number = locate(np.array([10**15 + 3]), weights)
    assert (int(part[0]), int(number[0])) == (2, 2 * 10**14)  # the fourth of a period is the third part's first


def test_the_sequence_of_the_docstring():
    assert turns((5, 3, 2))[0].tolist() == [0, 1, 0, 2, 0, 1, 0, 2, 1, 0]


@pytest.mark.parametrize(
    ("weights", "whole"),
    [((0.7, 0.3), (7, 3)), ((2, 4, 6), (1, 2, 3)), ((1, 1e-4), (10000, 1)), ((9,), (1,)), ((2**16 - 1, 1),) * 2],
)
def test_weights_are_the_decimals_that_are_written(weights, whole):
    assert whole_weights(weights, "weights") == whole


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1, 0), "mix: weights must be positive and finite, got 0"),
        ((float("nan"), 1), "got nan"),
        ((1, float("inf")), "got inf"),
        (
            (0.33333, 0.66668),
            r"exact only every .* samples; the maximum is 65,536\. Round them, for example to 33\.3, 66\.7\.",
        ),
    ],
)
def test_rejects_invalid_weights(weights, message):
    with pytest.raises(ValueError, match=message):
        whole_weights(weights, "mix")
