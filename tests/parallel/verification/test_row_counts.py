"""Which rows count other than once is found by running one row at a time, and is said by what the rows share."""

from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
import toy
from planted import MODEL, given_init
from spmdkit.parallel import FSDPConfig, Model, lay_out
from spmdkit.parallel.pipeline import PipelineConfig
from spmdkit.parallel.verification.reference import OneDevice, Sums
from spmdkit.parallel.verification.row_counts import Case, is_same, leaf_of, of_rows, of_stages

ROWS = 8
LOSSES = np.arange(1.0, ROWS + 1)


@cache
def layouts(fsdp=2):
    return lay_out(MODEL, {"data": 2, "fsdp": FSDPConfig(size=fsdp, floor_bytes=512)}, devices=toy.devices(2 * fsdp))


class Reference:
    """One device, on which each row counts once."""

    def sums(self, params, batch):
        return counted(batch, np.ones(ROWS))


def counted(batch, times):
    """What a step sums up that counts row n `times[n]` times."""
    weights = np.asarray(batch["weights"]) * times
    return Sums(float(weights @ LOSSES), float(weights.sum()), {"up": (weights @ LOSSES) * np.ones((4, 2))})


def case(times, microbatches=1, **batch):
    given = {"weights": np.full(ROWS, 0.5, np.float32), **batch}
    return Case(layouts(), microbatches, lambda params, batch: counted(batch, times), {}, Reference(), given)


def times(*rows, count=0):
    each = np.ones(ROWS)
    each[list(rows)] = count
    return each


@pytest.mark.parametrize(
    ("rows", "count", "microbatches", "text"),
    [
        ((2,), 0, 1, "row 2 of 8 is not counted."),
        ((1, 6), 2, 1, "rows 1, 6 of 8 counts 2 times."),
        ((4, 5, 6, 7), 2, 1, "what lies at data 1 (rows 4, 5, 6, 7 of 8) counts 2 times."),
        ((2, 3, 6, 7), 0, 1, "what lies at fsdp 1 (rows 2, 3, 6, 7 of 8) is not counted."),
        ((1, 3, 5, 7), 0, 2, "microbatch 2 of the 2 of every device (rows 1, 3, 5, 7 of 8) is not counted."),
    ],
)
def test_rows_are_named_by_what_they_share(rows, count, microbatches, text):
    assert of_rows(case(times(*rows, count=count), microbatches), None) == text


@pytest.mark.parametrize(
    "wrong",
    [np.ones(ROWS), times(1, count=1.5), times(2, count=0) + times(3, count=2) - 1],
    ids=["right", "half", "two"],
)
def test_what_is_not_as_simple_is_not_said(wrong):
    assert of_rows(case(wrong), None) == ""


def test_several_rows_make_a_microbatch():
    dropped = replace(case(times(2, 3, 6, 7), 2), layouts=layouts(fsdp=1))
    assert of_rows(dropped, None) == "microbatch 2 of the 2 of every device (rows 2, 3, 6, 7 of 8) is not counted."


def test_without_weights_or_with_many_rows_nothing_is_run():
    def run(params, batch):
        raise AssertionError

    many = Case(layouts(), 1, run, {}, Reference(), {"weights": np.ones(65)})
    without = Case(layouts(), 1, run, {}, Reference(), {"inputs": np.ones(8)})
    assert of_rows(many, None) == of_rows(without, None) == ""


def test_a_gradient_shows_its_own_rows():
    assert of_rows(case(times(3)), "up") == "row 3 of 8 is not counted."
    assert of_rows(case(times(3)), "up", slice(0, 2)) == "row 3 of 8 is not counted."

    def run(params, batch):
        found = counted(batch, times(3))
        return found._replace(gradients={"up": found.gradients["up"] + np.arange(8.0).reshape(4, 2)})

    assert of_rows(replace(case(times(3)), run=run), "up") == "", "no multiple of the reference"


@cache
def staged():
    model = replace(toy.BLOCK_MODEL, init=given_init)
    return lay_out(model, {"pipe": PipelineConfig(size=3, microbatches=3)}, devices=toy.devices(3))


def test_of_a_pipeline_the_stage_is_named():
    """One block on each of three stages; the second drops a row of its own gradient."""
    expected = LOSSES.sum() / 2 * np.ones((3, 2))
    value = expected.copy()
    value[1] = (LOSSES.sum() - LOSSES[5]) / 2

    class Blocks:
        def sums(self, params, batch):
            return of(batch, np.ones(ROWS))

    def of(batch, second):
        rows = [np.asarray(batch["weights"]) @ (LOSSES * each) for each in (1, second, 1)]
        return Sums(1.0, 1.0, {"blocks": {"up": np.stack([row * np.ones(2) for row in rows])}})

    given = {"weights": np.full(ROWS, 0.5)}
    found = Case(staged(), 1, lambda params, batch: of(batch, times(5)), {}, Blocks(), given)
    assert of_stages(found, "blocks/up", value, expected) == "on stage 1 of pipe alone: row 5 of 8 is not counted."
    simple = replace(found, batch={})
    assert of_stages(simple, "blocks/up", value, expected) == "it is wrong on stage 1 of pipe alone."
    assert of_stages(simple, "blocks/up", 2 * expected, expected) == "", "all stages are wrong"
    assert of_stages(simple, "head/out", value, expected) == "", "it is on every stage"
    assert of_stages(case(times(3)), "first", value, expected) == "", "there are no stages"


def test_the_contract_is_that_of_the_model_on_one_device():
    def mean(params, batch, key):
        return jnp.mean(batch["weights"] * params["x"]), jnp.float32(1)

    def summed(params, batch, key):
        return jnp.sum(batch["weights"] * params["x"]), batch["weights"].sum()

    def contract(loss):
        model = Model(init=lambda key: {"x": jnp.ones(1)}, loss=loss)
        one = OneDevice(model, None, clip_norm=0.0, compute="float32", seed=0)
        return Case(layouts(), 1, None, {"x": np.ones(1)}, one, {"weights": np.ones(4, np.float32)}).contract

    assert contract(mean).startswith("The model, not the strategy: on one device as well, its loss returns a mean")
    assert contract(summed) == ""


def test_leaves_and_sameness():
    assert leaf_of({"a": {"b": 3}}, "a/b") == 3
    value = np.array([1.0, 100.0])
    assert is_same(value + 0.009, value)
    assert not is_same(value + 0.011, value)
    assert is_same(np.zeros(0), np.zeros(0))
