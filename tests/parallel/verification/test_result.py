"""The result of a verification: text, JSON, claims, and the first difference in causal order."""

import json
from dataclasses import replace

import numpy as np
import pytest
from spmdkit.parallel.verification.causality import Future
from spmdkit.parallel.verification.collective_check import CollectiveCheck
from spmdkit.parallel.verification.compare import _worst_report
from spmdkit.parallel.verification.diagnosis import first_difference
from spmdkit.parallel.verification.differences import LeafError
from spmdkit.parallel.verification.reference import Reference, Sums, report
from spmdkit.parallel.verification.result import (
    LIGHT_BATCH,
    MAX_SHOWN,
    NEVER_CHECKED,
    NO_GRADIENT,
    Difference,
    Extent,
    Measured,
    Verification,
    list_proved,
    list_unchecked,
)
from spmdkit.parallel.verification.round_trip import RoundTrip
from spmdkit.parallel.xla.census import Collective

MOVED = (Collective("all-reduce", ("data",), 2, 1536),)
ERRORS = {
    "initial parameters": Measured(0.0, 1e-5, "first"),
    "loss": Measured(1e-16, 1e-9),
    "gradients": Measured(2e-15, 1e-9, "second"),
    LIGHT_BATCH: Measured(0.0, 1e-9, "loss"),
    "parameters": Measured(4e-15, 1e-8, "second"),
    "what a step reports": Measured(6e-16, 1e-8, "loss of step 1"),
}
AGREES = Verification(
    mesh={"data": 2, "fsdp": 1},
    dtype="float64",
    tolerance=1e-9,
    params_tolerance=1e-8,
    errors=ERRORS,
    gradients=(LeafError(2e-15, "second"), LeafError(1e-15, "first")),
    losses=(2.0, 1.5),
    reference_losses=(2.0, 1.5),
    collectives=CollectiveCheck(predicted=MOVED, found=MOVED),
    first_difference=None,
)
TRIP = RoundTrip(restored_onto={"fsdp": 2}, arrays=7, differing=(), next_step_rel=0.0)
BEYOND = replace(
    AGREES, errors={**ERRORS, "evaluation": Measured(1e-16, 1e-9)}, round_trip=TRIP, future=Future(positions=(0, 3, 6))
)
"""The same with the checks after the steps."""
OFF = Difference(what="gradients", where="first", relative=0.5, hint="Devices hold different values.")
FIRST = {"first": np.array([1.0, 2.0]), "second": np.array([[3.0]])}
REPORTS = report(2.0, 0.5, 8.0, {"hits": 4.0}), report(1.5, 0.25, 8.0, {"hits": 2.0})
LAST = {"first": np.array([2.0, 4.0]), "second": np.array([[6.0]])}


def reference(gradients=FIRST, params=LAST):
    """Two steps on one device."""
    return Reference(REPORTS, Sums(16.0, 8.0, gradients), params, ())


def line(result, start):
    """The one line of the text that begins so."""
    (found,) = [each for each in str(result).splitlines() if each.startswith(start)]
    return found.split()


def test_text_contains_verdict():
    assert AGREES.ok
    assert "The same as on one device." in str(AGREES)
    off = replace(AGREES, first_difference=OFF)
    assert not off.ok
    assert "DIFFERENT from one device, first in: gradients of first\n  Devices hold different values." in str(off)
    text = str(replace(AGREES, first_difference=replace(OFF, what=NO_GRADIENT, where="")))
    assert f"WRONG on one device already: {NO_GRADIENT}\n  Devices hold different values." in text
    assert "DIFFERENT from one device" not in text


def test_shows_each_error_with_its_tolerance():
    assert str(AGREES).startswith("data=2: 2 devices against one, in float64\n")
    assert line(AGREES, "initial parameters")[2:] == ["0.0e+00", "1e-05", "first"]
    assert line(AGREES, "loss") == ["loss", "1.0e-16", "1e-09"]
    assert line(AGREES, "gradients,") == ["gradients,", "2", "arrays", "2.0e-15", "1e-09", "second"]
    assert line(AGREES, "parameters after")[2:] == ["2", "steps", "4.0e-15", "1e-08", "second"]
    assert "evaluation" not in str(AGREES).split("proved:")[0]
    assert line(BEYOND, "evaluation") == ["evaluation", "1.0e-16", "1e-09"]
    assert line(BEYOND, "restored, bit for bit")[4:] == ["7", "arrays"]
    assert line(replace(BEYOND, round_trip=TRIP._replace(differing=("x",))), "restored,")[4:] == ["1", "differ"]


def test_marks_errors_above_tolerance():
    leaves = tuple(LeafError(1.0 - n / 10, f"leaf{n}") for n in range(8))
    errors = {**ERRORS, "gradients": Measured(1.0, 1e-9, "leaf0"), "parameters": Measured(5e-9, 1e-8)}
    text = str(replace(AGREES, gradients=leaves, errors=errors))
    assert [each.split(",")[0] for each in text.splitlines() if each.endswith("DIFFERS")] == ["gradients"]
    assert "  and the gradient of leaf1: 9.0e-01" in text
    assert text.count("and the gradient of") == MAX_SHOWN - 1
    assert Measured(float("nan"), 1.0).differs


def test_lists_collectives():
    assert "Collectives of the compiled step, as predicted\n  all-reduce" in str(AGREES)
    assert line(AGREES, "  all-reduce") == ["all-reduce", "over", "data", "2", "a", "step", "1.5", "KiB"]
    left = replace(AGREES, collectives=CollectiveCheck(MOVED, MOVED, MOVED))
    assert line(left, "  all-reduce")[-3:] == ["left", "to", "XLA"]
    wrong = replace(AGREES, collectives=CollectiveCheck(MOVED, (), unexpected=("one too many",)))
    assert "step, NOT as predicted\n  none\n  more: one too many" in str(wrong)
    merged = replace(AGREES, collectives=CollectiveCheck(MOVED, (), fewer=("one too few: merged",)))
    assert "step, fewer than predicted\n  none\n  fewer: one too few: merged" in str(merged)
    assert merged.ok
    collectives = merged.to_json()["collectives"]
    assert collectives["equal"] is True
    assert collectives["fewer"] == ["one too few: merged"]


def test_shows_reduced_sizes_notes_and_claims():
    result = replace(
        AGREES, reduced={"model.layers": (12, 2)}, notes=("it sends",), proved=("loss",), not_looked_at=("speed", "x")
    )
    assert line(result, "  model.layers") == ["model.layers", "12", "->", "2"]
    assert "Note: it sends" in str(result)
    assert str(result).endswith("proved: loss; not looked at: speed, x")
    assert "proved: nothing;" in str(AGREES)


def test_known_faults_may_concern_the_reference():
    fault = "jaxlib 1 on cpu: sums are wrong (https://x). The reference may be wrong, too: install jaxlib 2."
    result = replace(AGREES, known_faults=(fault,))
    assert f"\nNote: {fault}\n" in str(result)
    assert result.to_json()["known_faults"] == [fault]
    assert result.ok


def test_json_contains_plain_values():
    found = json.loads(json.dumps(BEYOND.to_json(), allow_nan=False))
    assert (found["ok"], found["dtype"], found["steps"], found["mesh"]) == (True, "float64", 2, {"data": 2, "fsdp": 1})
    assert (found["grad_max_rel"], found["worst_leaf"]) == (2e-15, "second")
    assert (found["params_rel"], found["worst_parameter"]) == (4e-15, "second")
    assert list(found["gradients"].items()) == [("first", 1e-15), ("second", 2e-15)]
    assert found["collectives"]["found"] == [{"kind": "all-reduce", "axes": ["data"], "count": 2, "bytes": 1536}]
    assert found["collectives"]["equal"] is True
    assert found["checkpoint"] == {"restored_onto": {"fsdp": 2}, "arrays": 7, "differing": [], "next_step_rel": 0.0}
    assert found["future"]["positions"] == [0, 3, 6]
    assert AGREES.to_json()["checkpoint"] is AGREES.to_json()["evaluation_rel"] is None


def test_json_replaces_infinity_with_null():
    off = replace(
        AGREES,
        errors={"loss": Measured(float("inf"), 1e-9)},
        losses=(float("nan"),),
        first_difference=replace(OFF, relative=float("inf")),
        collectives=CollectiveCheck(unexpected=("x",)),
        reduced={"train.steps": (100, 2)},
    )
    found = json.loads(json.dumps(off.to_json(), allow_nan=False))
    assert (found["ok"], found["loss_rel"], found["losses"]) == (False, None, [None])
    assert found["first_difference"] == {"what": "gradients", "where": "first", "relative": None, "hint": OFF.hint}
    assert found["collectives"]["equal"] is False
    assert found["reduced"] == {"train.steps": {"from": 100, "to": 2}}


def test_proves_only_checked_parts():
    everything = Extent(files=True, random=True)
    in_memory = Extent(files=False, random=False, contract="a few rows raise ValueError")
    assert list(list_proved(replace(BEYOND, first_difference=OFF), everything)) == []
    assert list(list_proved(AGREES, in_memory)) == [*ERRORS, "collectives"]
    beyond = list(list_proved(replace(BEYOND, loss_scale=""), everything))
    assert beyond == [
        "the model's contract",
        *(*ERRORS, "evaluation", "collectives", "random numbers", "a step that is not finite, and the loss scale"),
        "a checkpoint in files restored onto fsdp 2 and back",
    ]
    whole = replace(BEYOND, round_trip=TRIP._replace(restored_onto={}))
    assert "the state in memory restored onto 1 device and back" in list_proved(whole, in_memory)


def unchecked(measured, *, of=reference(), params=FIRST, **options):  # noqa: B008  (never changed)
    clip_norm = options.pop("clip_norm", 0.0)
    extent = Extent(**{"files": True, "random": True, **options})
    return list(list_unchecked(measured, of, params, extent, clip_norm))


def test_lists_parts_skipped_by_this_run():
    def added(*given, **options):
        return [text for text in unchecked(*given, **options) if text not in unchecked(BEYOND)]

    assert unchecked(BEYOND) == [*NEVER_CHECKED, "other dtypes than float64"]
    assert added(AGREES) == ["evaluation, checkpoints and later tokens (earlier results differ)"]
    assert added(BEYOND, files=False) == ["checkpoint files"]
    assert added(BEYOND, contract="model.check: off") == ["the model's contract (model.check: off)"]
    weightless = replace(BEYOND, errors={what: error for what, error in BEYOND.errors.items() if what != LIGHT_BATCH})
    assert added(weightless) == ["a batch with a weight below 1 (its weights are no floating-point numbers)"]
    assert added(BEYOND, random=False) == ["random numbers (the loss does not depend on the key)"]
    assert added(replace(BEYOND, errors=ERRORS)) == ["evaluation (one device cannot evaluate the model)"]
    assert added(replace(BEYOND, future=Future(untried="no tokens"))) == ["later tokens (no tokens)"]
    (text,) = added(replace(BEYOND, future=Future((0,), shared=True)))
    assert "all positions of a row share" in text
    assert added(replace(BEYOND, reduced={"model.layers": (12, 2)})) == ["the config's own sizes"]
    assert added(replace(BEYOND, notes=("a breach of the contract",))) == []
    assert added(BEYOND, replaces_gpu_code=True) == ["the GPU code that replaces the code in the note"]
    assert added(BEYOND, clip_norm=0.5) == ["clipping (no norm was over 0.5)"]
    assert added(BEYOND, clip_norm=0.4) == []


def test_names_unchanged_parameters():
    frozen = reference({**FIRST, "second": np.zeros((1, 1))}, FIRST)
    texts = unchecked(BEYOND, of=frozen)
    assert "gradients that are zero on one device (second)" in texts
    assert "updates of parameters that do not change on one device (first)" in texts
    many = {name: np.zeros(1) for name in "abcdefg"}
    texts = unchecked(BEYOND, of=reference(many, many), params=many)
    assert "gradients that are zero on one device (a, b, c and 4 more)" in texts


@pytest.mark.parametrize("number", range(len(ERRORS)), ids=list(ERRORS))
def test_reports_first_difference_in_order(number):
    """With it, everything after it differs as well."""
    errors = {
        what: error._replace(relative=1.0 + n) if n >= number else error
        for n, (what, error) in enumerate(ERRORS.items())
    }
    explain = {what: lambda where, what=what: f"why {what} {where}" for what in ERRORS}
    measured = replace(AGREES, errors=errors, collectives=CollectiveCheck(unexpected=("x",)))
    what = list(ERRORS)[number]
    where = ERRORS[what].where
    expected = Difference(what=what, where=where, relative=1.0 + number, hint=f"why {what} {where}")
    assert first_difference(measured, reference(), explain) == expected


def test_reports_missing_gradients_first_and_collectives_last():
    still = reference({"first": np.zeros(2), "second": np.zeros(1)})
    difference = first_difference(replace(AGREES, errors={"loss": Measured(1.0, 1e-9)}), still, {})
    assert difference.what == NO_GRADIENT
    assert "zero on one device as well, in all 2 arrays, at a loss of 2:" in difference.hint
    assert first_difference(AGREES, reference({"first": np.zeros(2), "second": np.ones(1)}), {}) is None
    wrong = replace(AGREES, collectives=CollectiveCheck(unexpected=("one too many", "another one")))
    difference = first_difference(wrong, reference(), {})
    assert (difference.what, difference.relative) == ("collectives", 2.0)
    assert "the collectives differ from the predictions: one too many; another one." in difference.hint


def test_finds_largest_error_of_reported_metrics():
    def worst(step=0, **wrong):
        reports = list(REPORTS)
        reports[step] = reports[step] | {name.replace("_", " "): value for name, value in wrong.items()}
        error, _, name = _worst_report(reports, reference(), 1e-9)
        return error, name

    assert worst()[0] == 0
    assert worst(1, weight=10.0) == (0.25, "weight of step 1")
    assert worst(gradient_norm=0.75) == (0.5, "gradient norm of step 0")
    assert worst(loss=3.0) == (0.5, "loss of step 0")
    assert worst(1, **{"metric_'hits'": 3.0}) == (0.5, "metric 'hits' of step 1")
