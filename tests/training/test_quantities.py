"""Numbers as people read them."""

import pytest
from spmdkit.training.quantities import compact, duration, is_number, loss_text, with_unit


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (7.256, "7.26"), (950, "950"), (999.6, "1.00k"), (12345, "12.3k"), (1.5e6, "1.50M"), (2e17, "200P")],
)
def test_counts_have_three_digits_and_a_prefix(value, text):
    assert compact(value) == text


def test_units_take_the_prefix():
    assert with_unit(1.2e9, "FLOP/s") == "1.20 GFLOP/s"
    assert with_unit(12, "FLOP/s") == "12 FLOP/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0431, "43.1 ms"), (8.21, "8.2 s"), (59.97, "1:00 min"), (125, "2:05 min"), (3725, "1:02:05 h")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_losses_keep_four_decimals_where_they_say_something():
    assert [loss_text(loss) for loss in (2.45678, 0.0, 1e-6, 3.2e7)] == ["2.4568", "0.0000", "1.000e-06", "3.200e+07"]


def test_only_finite_numbers_count():
    assert [is_number(value) for value in (1, 0.5, None, True, "1", float("nan"), float("inf"))] == [True] * 2 + [
        False
    ] * 5
