"""Of all that differs, what comes first in training is told, with what was measured about it."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from measured import AGREES, reference
from spmdkit.parallel.step.state import StepMetrics
from spmdkit.parallel.verification import first_difference as file
from spmdkit.parallel.verification.collective_check import CollectiveCheck
from spmdkit.parallel.verification.differences import LeafError
from spmdkit.parallel.verification.first_difference import Found, first_difference, reported_error
from spmdkit.parallel.verification.reference import Sums
from spmdkit.parallel.verification.result import NO_GRADIENT

EVERYTHING = {
    "loss_rel": 1.0,
    "weight_rel": 2.0,
    "gradients": (LeafError(3.0, "first"),),
    "grad_norm_rel": 4.0,
    "params": (LeafError(5.0, "second"),),
    "optimizer": (LeafError(6.0, "0/mu/second"), LeafError(0.0, "0/mu/first")),
    "reported": (7.0, "weight of step 1"),
    "collectives": CollectiveCheck(unexpected=("one too many", "one too few")),
}
"""What can differ, in the order of training, each with another error."""


@pytest.fixture(autouse=True)
def no_causes(monkeypatch):
    """Causes are looked for by other files; here they say who was asked."""
    for name in ("of_init", "of_loss", "of_weight", "of_gradient", "of_norm"):
        monkeypatch.setattr(file.diagnosis, name, lambda *given, name=name: name)
    monkeypatch.setattr(file.update_cause, "of_parameters", lambda *given: "of_parameters")


def found(measured, init=0.0, of_one_device=None):
    case, training = SimpleNamespace(), SimpleNamespace()
    sums = Sums(16.0, 8.0, {})
    return Found(measured, LeafError(init, "first"), sums, 0.5, of_one_device or reference(), lambda: case, training)


def test_nothing_differs_below_the_bounds():
    assert first_difference(found(AGREES)) is None
    assert first_difference(found(replace(AGREES, params=(LeafError(5e-9, "first"),)))) is None


def test_initial_parameters_come_before_all_else():
    first = first_difference(found(replace(AGREES, **EVERYTHING), init=1e-4))
    assert (first.what, first.where, first.relative, first.hint) == ("initial parameters", "first", 1e-4, "of_init")
    assert first_difference(found(AGREES, init=1e-6)) is None, "most models draw in float32"


ORDER = [
    ("loss", "", 1.0, "of_loss"),
    ("weight", "", 2.0, "of_weight"),
    ("gradients", "first", 3.0, "of_gradient"),
    ("gradient norm", "", 4.0, "of_norm"),
    ("parameters", "second", 5.0, "of_parameters"),
    ("optimizer's state", "0/mu/second", 6.0, "what later updates begin with"),
    ("what a step reports", "weight of step 1", 7.0, "the weight of step 1 is reported wrongly"),
    ("collectives", "", 2.0, "more or less moves than the strategies say: one too many; one too few."),
]


@pytest.mark.parametrize("number", range(len(ORDER)), ids=[what for what, *_ in ORDER])
def test_what_comes_first_in_training_is_told(number):
    """With it, everything after it differs as well."""
    differing = dict(list(EVERYTHING.items())[number:])
    first = first_difference(found(replace(AGREES, **differing)))
    what, where, relative, hint = ORDER[number]
    assert (first.what, first.where, first.relative) == (what, where, relative)
    assert hint in first.hint


def test_a_model_without_any_gradient_is_told_before_a_difference():
    still = reference(gradients={"first": np.zeros(2), "second": np.zeros(1)})
    first = first_difference(found(replace(AGREES, loss_rel=1.0), 1.0, still))
    assert first.what == NO_GRADIENT
    assert "zero on one device as well, in all 2 arrays, at a loss of 2:" in first.hint
    partly = reference(gradients={"first": np.zeros(2), "second": np.ones(1)})
    assert first_difference(found(AGREES, of_one_device=partly)) is None


def test_causes_get_sums_of_one_device_not_means(monkeypatch):
    given = []
    monkeypatch.setattr(file.diagnosis, "of_loss", lambda *arguments: given.append(arguments[2]) or "")
    first_difference(found(replace(AGREES, loss_rel=1.0)))
    (expected,) = given
    assert (expected.total, expected.weight) == (16, 8)
    assert expected.gradients["first"].tolist() == [8, 16]


def test_the_largest_error_that_a_step_reports():
    right = [StepMetrics(2.0, 0.5, 8.0), StepMetrics(1.5, 0.25, 8.0)]
    assert reported_error(right, reference())[0] == 0
    assert reported_error([right[0], right[1]._replace(weight=10.0)], reference()) == (0.25, "weight of step 1")
    assert reported_error([right[0]._replace(grad_norm=0.75), right[1]], reference()) == (
        0.5,
        "gradient norm of step 0",
    )
    assert reported_error([right[0]._replace(loss=3.0), right[1]], reference()) == (0.5, "loss of step 0")
