"""Formats of numbers."""

import pytest
from spmdkit.training.quantities import compact, duration, is_number, loss_text, with_unit


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        *((compact, *case) for case in ((0, "0"), (7.256, "7.26"), (950, "950"), (999.6, "1.00k"), (12345, "12.3k"))),
        *((compact, *case) for case in ((1.5e6, "1.50M"), (2e17, "200P"))),
        *((duration, *case) for case in ((0.0431, "43.1 ms"), (8.21, "8.2 s"), (59.97, "1:00 min"))),
        *((duration, *case) for case in ((125, "2:05 min"), (3725, "1:02:05 h"))),
        *((loss_text, *case) for case in ((2.45678, "2.4568"), (0.0, "0.0000"), (1e-6, "1.000e-06"))),
        (loss_text, 3.2e7, "3.200e+07"),
        (lambda value: with_unit(value, "FLOP/s"), 1.2e9, "1.20 GFLOP/s"),
        (lambda value: with_unit(value, "FLOP/s"), 12, "12 FLOP/s"),
    ],
)
def test_formats(write, value, text):
    assert write(value) == text


def test_only_finite_numbers_count():
    values = (1, 0.5, None, True, "1", float("nan"), float("inf"))
    assert [is_number(value) for value in values] == [True, True, False, False, False, False, False]
