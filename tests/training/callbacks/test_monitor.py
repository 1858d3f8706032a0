"""A metric that is watched: what counts as better, and what is said where nothing is."""

import math

import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.training.callbacks.monitor import Monitor, number_problems, refuse


def seen(monitor, *values):
    return [monitor.improves({"eval_loss": value}) for value in values]


@pytest.mark.parametrize(
    ("mode", "min_delta", "expected"),
    [
        ("min", 0.0, [True, False, True, True]),
        ("max", 0.0, [True, False, False, False]),
        ("min", 0.5, [True, False, False, True]),
    ],
)
def test_what_is_better(mode, min_delta, expected):
    """Of 2, 2, 1.5 and 1: equal is no better, nor is what is better by no more than `min_delta`."""
    assert seen(Monitor("eval_loss", mode, min_delta), 2.0, 2.0, 1.5, 1.0) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_the_best(value):
    monitor = Monitor("eval_loss", "min")
    assert seen(monitor, value, 3.0, value, 4.0) == [False, True, False, False]
    assert monitor.best == 3.0


def test_what_is_said():
    monitor = Monitor("eval_loss", "min", 0.1)
    assert monitor.no_better(1) == "eval_loss has not fallen by more than 0.1 in 1 evaluation"
    seen(monitor, 2.5)
    assert monitor.no_better(3) == "eval_loss has not fallen by more than 0.1 from 2.5 in 3 evaluations"
    assert Monitor("accuracy", "max").no_better(2) == "accuracy has not risen in 2 evaluations"


def test_a_metric_that_there_is_not():
    with pytest.raises(UserError, match=r"monitor='eval_los'.*no such metric\. Did you mean eval_loss"):
        Monitor("eval_los", "min").value({"eval_loss": 1.0, "accuracy": 0.5})


def test_options_with_a_smallest_value():
    assert number_problems({"patience": 1, "min_delta": 0}, {"patience": 1, "min_delta": 0.0}) == []
    found = number_problems({"patience": 1, "min_delta": 0}, {"patience": 0, "min_delta": math.nan})
    assert found == [
        "patience=0 has to be at least 1, and finite.",
        "min_delta=nan has to be at least 0, and finite.",
    ]
    refuse([])
    with pytest.raises(UserError, match=r"patience=0 .*\nmin_delta=nan"):
        refuse(found)
