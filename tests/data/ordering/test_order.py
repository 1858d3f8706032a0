"""The order is a permutation each epoch, new each time, and a function of (seed, index) alone."""

import numpy as np
import pytest
from spmdkit.data import sample_order
from spmdkit.data.ordering.order import batch_number


def epoch(size, seed=0, number=0):
    return sample_order(np.arange(number * size, (number + 1) * size), num_examples=size, seed=seed)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 10, 16, 17, 100, 255, 256, 257, 1000, 28321, 65537])
def test_each_epoch_is_a_permutation(size):
    for seed, number in ((0, 0), (1, 0), (0, 3)):
        assert np.array_equal(np.sort(epoch(size, seed, number)), np.arange(size))


def test_epochs_and_seeds_give_different_orders():
    orders = [epoch(1000, seed, number) for seed in range(3) for number in range(3)]
    for i, order in enumerate(orders):
        assert all(np.mean(order == other) < 0.02 for other in orders[:i])


def test_an_entry_depends_on_its_index_alone():
    samples = np.random.default_rng(0).integers(0, 5000, size=400)
    together = sample_order(samples, num_examples=300, seed=7)
    alone = [int(sample_order(np.array([sample]), num_examples=300, seed=7)[0]) for sample in samples]
    assert together.tolist() == alone


def test_the_order_never_changes():
    """A run that resumes with a newer version must see the same examples."""
    assert epoch(10).tolist() == [3, 1, 9, 6, 7, 0, 4, 5, 2, 8]
    assert sample_order(np.array([0, 10**12]), num_examples=10**6, seed=42).tolist() == [524003, 775648]


def test_without_shuffling():
    assert sample_order(np.arange(7), num_examples=3, seed=0, shuffle=False).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_huge_splits():
    size = 2**40 + 7
    examples = sample_order(np.arange(10000), num_examples=size, seed=0)
    assert len(set(examples.tolist())) == 10000
    assert np.histogram(examples, 8, (0, size))[0] == pytest.approx(1250, rel=0.15)


@pytest.mark.parametrize("left_out", [[], [0], [3], [3, 0], [4, 5, 6], [0, 1, 9], [11]])
def test_batches_that_are_left_out_are_those_that_no_step_gets(left_out):
    kept = [number for number in range(12) if number not in left_out]
    assert [batch_number(step, left_out) for step in range(len(kept))] == kept
