"""What is said of a breach holds what was measured, and what to do instead."""

import pytest
from spmdkit.parallel.verification.contract import words
from spmdkit.parallel.verification.contract.probe import Pair, Pairs

FOUND = Pairs(Pair(10, 4), Pair(3, 2), Pair(4, 2), Pair(11, 4), Pair(2, 0))
ALONE = Pairs(Pair(6, 4), Pair(3, 2), Pair(3, 2), Pair(6, 4), Pair(0, 0))


def test_random_numbers_of_the_whole_batch():
    text = words.random(FOUND, ALONE)
    assert "4 rows give a sum of 10, their halves 3 + 4 = 7, in another order 11; without a key both give 6." in text
    assert 'fold_in(key, batch["example"][row])' in text
    assert "without a key" not in words.random(FOUND, None)


def test_rows_that_depend_on_each_other():
    text = words.rows(FOUND, is_mean=False)
    assert text.startswith("its rows depend on each other. 4 rows give (10, 4), their halves (3, 2) + (4, 2) = (7, 4),")
    assert "in another order (11, 4)." in text
    assert words.rows(FOUND, is_mean=True).startswith("its rows also depend")


@pytest.mark.parametrize(
    ("twice", "meaning"),
    [(Pair(3, 4), "divides by the weight once more"), (Pair(3, 2), "would take a mean of means")],
)
def test_a_mean_that_is_returned_as_the_sum(twice, meaning):
    text = words.mean(twice, Pair(3, 2))
    assert f"2 rows give (3, 2), the same rows twice {twice}: the sum is 1 times as large and has to be 2" in text
    assert meaning in text


def test_a_penalty_on_every_call():
    text = words.constant(FOUND)
    assert "it adds 2 on every call" in text
    assert "4 rows give (10, 4), with weights of zero (2, 0)." in text
    assert 'add penalty * batch["weights"].sum() to the sum' in text


@pytest.mark.parametrize(
    ("zero", "remedy"),
    [
        (Pair(float("nan"), 0), "The loss divides by the sum of the weights"),
        (Pair(2, 0), "The loss does not multiply what a row (or a token) loses"),
        (Pair(0, 4), 'The weight is not the sum of batch["weights"]'),
    ],
)
def test_rows_of_weight_zero_that_count(zero, remedy):
    text = words.unweighted(FOUND._replace(unweighted=zero))
    assert f"with weights of zero {zero}, which has to be (0, 0)" in text
    assert remedy in text


def test_weights_that_do_not_add_up_or_are_none():
    assert "their halves (3, 2) + (4, 2) = (7, 4). The runtime divides by the sum" in words.weight_alone(FOUND)
    assert "4 rows that have weight give (10, 4), and the runtime divides by the weight" in words.no_weight(FOUND)


def test_a_model_without_gradients():
    assert "every gradient is zero: 12,345 parameters, a loss of (10, 4)" in words.dead(12345, FOUND.whole)
    text = words.dead_at_first(12345, FOUND.whole)
    assert text.startswith("every gradient is zero at the parameters that init returns: 12,345 parameters")
    assert "Draw the parameters at random" in text
