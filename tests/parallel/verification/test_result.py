"""What a verification says: as text, one line for each error, and as JSON without infinities."""

import json
from dataclasses import replace

import pytest
from measured import AGREES, BEYOND, MOVED, TRIP
from spmdkit.parallel.verification.causality import Future
from spmdkit.parallel.verification.collective_check import CollectiveCheck
from spmdkit.parallel.verification.differences import LeafError
from spmdkit.parallel.verification.result import MOST_SHOWN, OF_THE_MODEL, Difference

OFF = Difference(what="gradients", where="first", relative=0.5, hint="Devices hold different values.")


def line(result, start):
    """The one line of the text that begins so."""
    (found,) = [each for each in str(result).splitlines() if each.startswith(start)]
    return found.split()


def test_it_is_ok_where_nothing_differs():
    assert AGREES.ok
    assert "The same as on one device." in str(AGREES)
    off = replace(AGREES, first_difference=OFF)
    assert not off.ok
    assert "DIFFERENT from one device, first in: gradients of first\n  Devices hold different values." in str(off)


@pytest.mark.parametrize("what", OF_THE_MODEL)
def test_what_one_device_shows_as_well_is_no_difference_from_it(what):
    text = str(replace(AGREES, first_difference=replace(OFF, what=what, where="")))
    assert f"WRONG on one device already: {what}\n  Devices hold different values." in text
    assert "DIFFERENT from one device" not in text


def test_the_first_line_names_mesh_and_dtype():
    assert str(AGREES).startswith("data=2: 2 devices against one, in float64\n")
    assert str(replace(AGREES, mesh={})).startswith("no axes: 1 device against one")


def test_each_error_stands_beside_its_own_bound():
    assert line(AGREES, "initial parameters") == ["initial", "parameters", "0.0e+00", "1e-05"]
    assert line(AGREES, "loss") == ["loss", "1.0e-16", "1e-09"]
    assert line(AGREES, "gradients,") == ["gradients,", "2", "arrays", "2.0e-15", "1e-09", "second"]
    assert line(AGREES, "parameters after") == ["parameters", "after", "2", "steps", "4.0e-15", "1e-08", "second"]
    assert line(AGREES, "optimizer's")[2:] == ["5.0e-15", "1e-08", "0/mu/second"]
    assert line(AGREES, "reported by")[4:] == ["6.0e-16", "1e-08", "loss", "of", "step", "1"]
    assert line(replace(AGREES, optimizer=()), "optimizer's")[2:] == ["0.0e+00", "1e-08", "none"]


def test_only_what_is_over_its_bound_differs():
    marked = replace(AGREES, weight_rel=1e-3, params=(LeafError(5e-9, "first"),))
    assert [each.split()[0] for each in str(marked).splitlines() if each.endswith("DIFFERS")] == ["weight"]


def test_other_gradients_that_differ_are_listed():
    errors = tuple(LeafError(1.0 - n / 10, f"leaf{n}") for n in range(8))
    text = str(replace(AGREES, gradients=errors))
    assert "  and the gradient of leaf1: 9.0e-01" in text
    assert text.count("and the gradient of") == MOST_SHOWN - 1


def test_what_is_beyond_the_steps_is_shown_where_it_was_looked_at():
    assert "evaluation" not in str(AGREES).split("proved:")[0]
    assert line(BEYOND, "evaluation") == ["evaluation", "1.0e-16", "1e-09"]
    assert line(BEYOND, "loss with other later tokens")[5:] == ["0.0e+00", "1e-09"]
    assert line(replace(BEYOND, future=Future((0, 3), (3, 0.25))), "loss with")[5:] == [
        *("2.5e-01", "1e-09", "after", "position", "3", "DIFFERS")
    ]
    assert line(BEYOND, "saved parameters")[2:] == ["1.0e-15", "1e-08", "first"]
    assert line(BEYOND, "restored, bit for bit")[4:] == ["7", "arrays"]
    assert line(replace(BEYOND, round_trip=TRIP._replace(differing=("x",))), "restored,")[4:] == ["1", "differ"]


def test_collectives_are_listed_with_what_nobody_predicted():
    assert "Collectives of the compiled step, as predicted\n  all-reduce" in str(AGREES)
    assert line(AGREES, "  all-reduce") == ["all-reduce", "over", "data", "2", "a", "step", "1.5", "KiB"]
    left = replace(AGREES, collectives=CollectiveCheck(MOVED, MOVED, MOVED))
    assert line(left, "  all-reduce")[-3:] == ["left", "to", "XLA"]
    wrong = replace(AGREES, collectives=CollectiveCheck(MOVED, (), (), ("one too few",)))
    assert "step, NOT as predicted\n  none\n  one too few" in str(wrong)


def test_a_reduced_size_notes_and_claims_are_said():
    told = replace(
        AGREES, reduced={"model.layers": (12, 2)}, notes=("it sends",), proved=("loss",), not_looked_at=("speed", "x")
    )
    assert line(told, "  model.layers") == ["model.layers", "12", "->", "2"]
    assert "Note: it sends" in str(told)
    assert str(told).endswith("proved: loss; not looked at: speed, x")
    assert "proved: nothing;" in str(AGREES)


def test_json_is_the_same_in_plain_values():
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


def test_json_of_a_difference_has_null_for_infinity():
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
