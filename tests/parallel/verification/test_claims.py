"""What a run proves and what it did not look at follow from what was measured."""

from dataclasses import replace

import numpy as np
from measured import AGREES, BEYOND, TRIP, reference
from spmdkit.parallel.verification.causality import Future
from spmdkit.parallel.verification.claims import ALWAYS, frozen_parameters, not_looked_at, proved
from spmdkit.parallel.verification.result import Difference

FIRST = {"first": np.array([1.0, 2.0]), "second": np.array([[3.0]])}
FILES = {"files": True, "random": True}


def unseen(measured, *, reference=reference(), clip_norm=0.0, **options):  # noqa: B008  (never changed)
    return list(not_looked_at(measured, reference, FIRST, clip_norm=clip_norm, **{**FILES, **options}))


def test_frozen_parameters_are_those_without_any_gradient():
    gradients = {"a": np.zeros(3), "b": np.array([0.0, 1e-30]), "c": {"d": np.zeros((2, 2))}}
    assert frozen_parameters(reference(gradients=gradients)) == ["a", "c/d"]


def test_nothing_is_proved_where_something_differs():
    off = replace(BEYOND, first_difference=Difference(what="loss", where="", relative=1.0, hint=""))
    assert list(proved(off, **FILES)) == []


def test_each_part_is_proved_only_where_it_was_looked_at():
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


def test_what_is_never_looked_at_is_said_every_time():
    assert unseen(BEYOND) == [*ALWAYS, "other dtypes than float64"]


def test_what_this_run_left_out_is_said():
    def added(*given, **options):
        return [text for text in unseen(*given, **options) if text not in unseen(BEYOND)]

    assert added(AGREES) == ["evaluation, checkpoints and later tokens (what comes before differs)"]
    assert added(BEYOND, files=False) == ["checkpoint files"]
    assert added(BEYOND, random=False) == ["random numbers (the loss does not depend on the key)"]
    assert added(replace(BEYOND, evaluation_rel=None)) == ["evaluation (one device cannot evaluate the model)"]
    assert added(replace(BEYOND, future=Future(untried="no tokens"))) == ["later tokens (no tokens)"]
    (text,) = added(replace(BEYOND, future=Future((0,), shared=True)))
    assert "all positions of a row share" in text
    assert added(replace(BEYOND, reduced={"model.layers": (12, 2)})) == ["the config's own sizes"]
    assert added(replace(BEYOND, notes=("x",))) == ["what GPUs run in place of what the note says"]
    assert added(BEYOND, clip_norm=0.5) == ["clipping (no norm was over 0.5)"]
    assert added(BEYOND, clip_norm=0.4) == []


def test_parameters_that_stand_still_are_named():
    frozen = reference(gradients={**FIRST, "second": np.zeros((1, 1))}, params=FIRST)
    texts = unseen(BEYOND, reference=frozen)
    assert "gradients that are zero on one device (second)" in texts
    assert "updates of what does not move on one device (first)" in texts


def test_of_many_frozen_parameters_the_first_are_named():
    many = {name: np.zeros(1) for name in "abcde"}
    (text,) = [
        each
        for each in not_looked_at(BEYOND, reference(gradients=many, params=many), many, **FILES, clip_norm=0.0)
        if "zero" in each
    ]
    assert text == "gradients that are zero on one device (a, b, c and 2 more)"
