"""The result of a verification: text, JSON, claims, and the first difference in causal order."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from spmdkit.parallel.step.state import StepMetrics
from spmdkit.parallel.verification import first_difference as file
from spmdkit.parallel.verification.causality import Future
from spmdkit.parallel.verification.claims import ALWAYS, not_looked_at, proved
from spmdkit.parallel.verification.collective_check import CollectiveCheck
from spmdkit.parallel.verification.differences import LeafError
from spmdkit.parallel.verification.first_difference import differences, reported_error
from spmdkit.parallel.verification.reference import Sums
from spmdkit.parallel.verification.result import MAX_SHOWN, NO_GRADIENT, Difference
from support.verification import AGREES, BEYOND, MOVED, TRIP, reference

OFF = Difference(what="gradients", where="first", relative=0.5, hint="Devices hold different values.")


def line(result, start):
    """The one line of the text that begins so."""
    (found,) = [each for each in str(result).splitlines() if each.startswith(start)]
    return found.split()


def test_ok_if_nothing_differs():
    assert AGREES.ok
    assert "The same as on one device." in str(AGREES)
    off = replace(AGREES, first_difference=OFF)
    assert not off.ok
    assert "DIFFERENT from one device, first in: gradients of first\n  Devices hold different values." in str(off)


def test_findings_on_one_device_are_not_differences():
    text = str(replace(AGREES, first_difference=replace(OFF, what=NO_GRADIENT, where="")))
    assert f"WRONG on one device already: {NO_GRADIENT}\n  Devices hold different values." in text
    assert "DIFFERENT from one device" not in text


def test_shows_each_error_with_its_tolerance():
    assert str(AGREES).startswith("data=2: 2 devices against one, in float64\n")
    assert line(AGREES, "initial parameters") == ["initial", "parameters", "0.0e+00", "1e-05"]
    assert line(AGREES, "loss") == ["loss", "1.0e-16", "1e-09"]
    assert line(AGREES, "gradients,") == ["gradients,", "2", "arrays", "2.0e-15", "1e-09", "second"]
    assert line(AGREES, "parameters after") == ["parameters", "after", "2", "steps", "4.0e-15", "1e-08", "second"]
    assert line(AGREES, "optimizer's")[2:] == ["5.0e-15", "1e-08", "0/mu/second"]
    assert line(AGREES, "reported by")[4:] == ["6.0e-16", "1e-08", "loss", "of", "step", "1"]
    assert line(replace(AGREES, optimizer=()), "optimizer's")[2:] == ["0.0e+00", "1e-08", "none"]


def test_marks_errors_above_tolerance():
    errors = tuple(LeafError(1.0 - n / 10, f"leaf{n}") for n in range(8))
    text = str(replace(AGREES, gradients=errors, params=(LeafError(5e-9, "first"),)))
    assert [each.split(",")[0] for each in text.splitlines() if each.endswith("DIFFERS")] == ["gradients"]
    assert "  and the gradient of leaf1: 9.0e-01" in text
    assert text.count("and the gradient of") == MAX_SHOWN - 1


def test_shows_later_checks_if_they_ran():
    assert "evaluation" not in str(AGREES).split("proved:")[0]
    assert line(BEYOND, "evaluation") == ["evaluation", "1.0e-16", "1e-09"]
    assert line(BEYOND, "loss with other later tokens")[5:] == ["0.0e+00", "1e-09"]
    assert line(replace(BEYOND, future=Future((0, 3), (3, 0.25))), "loss with")[5:] == [
        *("2.5e-01", "1e-09", "after", "position", "3", "DIFFERS")
    ]
    assert line(BEYOND, "saved parameters")[2:] == ["1.0e-15", "1e-08", "first"]
    assert line(BEYOND, "restored, bit for bit")[4:] == ["7", "arrays"]
    assert line(replace(BEYOND, round_trip=TRIP._replace(differing=("x",))), "restored,")[4:] == ["1", "differ"]


def test_lists_unpredicted_collectives():
    assert "Collectives of the compiled step, as predicted\n  all-reduce" in str(AGREES)
    assert line(AGREES, "  all-reduce") == ["all-reduce", "over", "data", "2", "a", "step", "1.5", "KiB"]
    left = replace(AGREES, collectives=CollectiveCheck(MOVED, MOVED, MOVED))
    assert line(left, "  all-reduce")[-3:] == ["left", "to", "XLA"]
    wrong = replace(AGREES, collectives=CollectiveCheck(MOVED, (), (), ("one too few",)))
    assert "step, NOT as predicted\n  none\n  one too few" in str(wrong)


def test_shows_reduced_sizes_notes_and_claims():
    told = replace(
        AGREES, reduced={"model.layers": (12, 2)}, notes=("it sends",), proved=("loss",), not_looked_at=("speed", "x")
    )
    assert line(told, "  model.layers") == ["model.layers", "12", "->", "2"]
    assert "Note: it sends" in str(told)
    assert str(told).endswith("proved: loss; not looked at: speed, x")
    assert "proved: nothing;" in str(AGREES)


def test_json_contains_plain_values():
    found = json.loads(json.dumps(BEYOND.to_json(), allow_nan=False))
    assert (found["ok"], found["dtype"], found["steps"], found["mesh"]) == (True, "float64", 2, {"data": 2, "fsdp": 1})
    assert (found["grad_max_rel"], found["worst_leaf"]) == (2e-15, "second")
    assert (found["params_rel"], found["worst_parameter"], found["optimizer_rel"]) == (4e-15, "second", 5e-15)
    assert found["gradients"] == {"first": 1e-15, "second": 2e-15}
    assert list(found["gradients"]) == ["first", "second"]
    assert found["collectives"]["found"] == [{"kind": "all-reduce", "axes": ["data"], "count": 2, "bytes": 1536}]
    assert found["collectives"]["equal"] is True
    assert found["checkpoint"] == {
        **{"restored_onto": {"fsdp": 2}, "arrays": 7, "params_rel": 1e-15, "differing": [], "next_step_rel": 0.0}
    }
    assert found["future"]["positions"] == [0, 3, 6]
    assert AGREES.to_json()["checkpoint"] is AGREES.to_json()["future"] is None


def test_json_replaces_infinity_with_null():
    off = replace(
        AGREES,
        loss_rel=float("inf"),
        losses=(float("nan"),),
        first_difference=replace(OFF, relative=float("inf")),
        collectives=CollectiveCheck(unexpected=("x",)),
        reduced={"train.steps": (100, 2)},
    )
    found = json.loads(json.dumps(off.to_json(), allow_nan=False))
    assert (found["ok"], found["loss_rel"], found["losses"]) == (False, None, [None])
    assert found["first_difference"] == {**{"what": "gradients", "where": "first", "relative": None, "hint": OFF.hint}}
    assert found["collectives"]["equal"] is False
    assert found["reduced"] == {"train.steps": {"from": 100, "to": 2}}


FIRST = {"first": np.array([1.0, 2.0]), "second": np.array([[3.0]])}
FILES = {"files": True, "random": True}


def unseen(measured, *, reference=reference(), clip_norm=0.0, **options):  # noqa: B008  (never changed)
    return list(not_looked_at(measured, reference, FIRST, clip_norm=clip_norm, **{**FILES, **options}))


def test_proves_only_checked_parts():
    assert list(proved(replace(BEYOND, first_difference=OFF), **FILES)) == []
    steps_alone = list(proved(AGREES, files=False, random=False))
    assert steps_alone == [
        *("initial parameters", "loss", "weight", "gradients", "gradient norm"),
        *("2 steps with what each reports", "parameters and optimizer's state after them", "collectives"),
    ]
    added = [text for text in proved(BEYOND, **FILES) if text not in steps_alone]
    assert added == [
        "random numbers",
        "evaluation",
        "a checkpoint in files restored onto fsdp 2 and back",
        "losses that later tokens do not change (after 3 positions)",
    ]
    in_memory = replace(BEYOND, round_trip=TRIP._replace(mesh={}))
    assert "the state in memory restored onto 1 device and back" in proved(in_memory, files=False, random=True)
    assert not [text for text in proved(replace(BEYOND, future=Future(untried="why")), **FILES) if "tokens" in text]


def test_lists_parts_skipped_by_this_run():
    def added(*given, **options):
        return [text for text in unseen(*given, **options) if text not in unseen(BEYOND)]

    assert unseen(BEYOND) == [*ALWAYS, "other dtypes than float64"]
    assert added(AGREES) == ["evaluation, checkpoints and later tokens (what comes before differs)"]
    assert added(BEYOND, files=False) == ["checkpoint files"]
    assert added(BEYOND, random=False) == ["random numbers (the loss does not depend on the key)"]
    assert added(replace(BEYOND, evaluation_rel=None)) == ["evaluation (one device cannot evaluate the model)"]
    assert added(replace(BEYOND, future=Future(untried="no tokens"))) == ["later tokens (no tokens)"]
    (text,) = added(replace(BEYOND, future=Future((0,), shared=True)))
    assert "all positions of a row share" in text
    assert added(replace(BEYOND, reduced={"model.layers": (12, 2)})) == ["the config's own sizes"]
    assert added(replace(BEYOND, notes=("x",))) == ["the GPU code that replaces what the note describes"]
    assert added(BEYOND, clip_norm=0.5) == ["clipping (no norm was over 0.5)"]
    assert added(BEYOND, clip_norm=0.4) == []


def test_names_unchanged_parameters():
    frozen = reference(gradients={**FIRST, "second": np.zeros((1, 1))}, params=FIRST)
    texts = unseen(BEYOND, reference=frozen)
    assert "gradients that are zero on one device (second)" in texts
    assert "updates of what does not move on one device (first)" in texts
    many = {name: np.zeros(1) for name in "abcde"}
    options = {**FILES, "clip_norm": 0.0}
    texts = not_looked_at(BEYOND, reference(gradients=many, params=many), many, **options)
    assert "gradients that are zero on one device (a, b, c and 2 more)" in list(texts)


EVERYTHING = {
    "init": 1e-4,
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
    for name in ("explain_init", "explain_loss", "explain_gradient", "explain_parameters"):
        monkeypatch.setattr(file.diagnosis, name, lambda *given, name=name: name)


def first(measured, init=0.0, of_one_device=None):
    found, one = Sums(16.0, 16.0, {}), of_one_device or reference()
    return next(differences(measured, LeafError(init, "first"), found, 0.75, one, SimpleNamespace, None), None)


ORDER = [
    ("initial parameters", "first", 1e-4, "explain_init"),
    ("loss", "", 1.0, "explain_loss"),
    ("weight", "", 2.0, "It is 16, and 8 on one device: 2 times the reference. The mean is right"),
    ("gradients", "first", 3.0, "explain_gradient"),
    ("gradient norm", "", 4.0, "It is 1.5 times the reference, while every gradient is right."),
    ("parameters", "second", 5.0, "explain_parameters"),
    ("optimizer's state", "0/mu/second", 6.0, "what later updates begin with"),
    ("what a step reports", "weight of step 1", 7.0, "the weight of step 1 is reported wrongly"),
    ("collectives", "", 2.0, "the collectives differ from the predictions: one too many; one too few."),
]


@pytest.mark.parametrize("number", range(len(ORDER)), ids=[what for what, *_ in ORDER])
def test_reports_first_difference_in_order(number):
    """With it, everything after it differs as well."""
    differing = dict(list(EVERYTHING.items())[number:])
    difference = first(init=differing.pop("init", 1e-6), measured=replace(AGREES, **differing))
    what, where, relative, hint = ORDER[number]
    assert (difference.what, difference.where, difference.relative) == (what, where, relative)
    assert hint in difference.hint


def test_reports_missing_gradients_before_differences():
    still = reference(gradients={"first": np.zeros(2), "second": np.zeros(1)})
    difference = first(replace(AGREES, loss_rel=1.0), 1.0, still)
    assert difference.what == NO_GRADIENT
    assert "zero on one device as well, in all 2 arrays, at a loss of 2:" in difference.hint
    partly = reference(gradients={"first": np.zeros(2), "second": np.ones(1)})
    assert first(AGREES, of_one_device=partly) is None


def test_passes_sums_of_one_device_to_causes(monkeypatch):
    given = []
    monkeypatch.setattr(file.diagnosis, "explain_loss", lambda *arguments: given.append(arguments[2]) or "")
    first(replace(AGREES, loss_rel=1.0))
    (expected,) = given
    assert (expected.total, expected.weight) == (16, 8)
    assert expected.gradients["first"].tolist() == [8, 16]


def test_finds_largest_error_of_reported_metrics():
    right = [StepMetrics(2.0, 0.5, 8.0), StepMetrics(1.5, 0.25, 8.0)]
    assert reported_error(right, reference())[0] == 0
    assert reported_error([right[0], right[1]._replace(weight=10.0)], reference()) == (0.25, "weight of step 1")
    wrong = [right[0]._replace(grad_norm=0.75), right[1]]
    assert reported_error(wrong, reference()) == (0.5, "gradient norm of step 0")
    assert reported_error([right[0]._replace(loss=3.0), right[1]], reference()) == (0.5, "loss of step 0")
