"""Causes of differences: factors, replicas, rows that do not count once, and updates."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from spmdkit.parallel import lay_out
from spmdkit.parallel.pipeline import PipelineConfig
from spmdkit.parallel.verification import diagnosis
from spmdkit.parallel.verification.reference import Sums
from spmdkit.parallel.verification.row_counts import Case, of_rows, of_stages
from support import toy
from support.verification import BLOCK_MODEL, MESH, MODEL


@cache
def layouts():
    return lay_out(MODEL, MESH, devices=toy.devices(4))


def case(contract=""):
    """A model with this breach of its contract, and a batch without weights."""
    made = Case(layouts(), 1, None, None, None, {})
    made.__dict__["contract"] = contract  # else it would be measured
    return made


def on_mesh(whole, spec=()):
    mesh = layouts().mesh.backend_mesh
    return jax.device_put(jnp.asarray(whole, jnp.float32), NamedSharding(mesh, PartitionSpec(*spec)))


# Factors and orders


VALUE = np.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (4 * VALUE, "4 times the reference in every element."),
        ((1 - 3e-6) * VALUE, "1 - 3.0e-06 times the reference in every element."),
        (VALUE.T.reshape(2, 3), "the same numbers in other places."),
        (VALUE + 1, "no multiple of the reference"),
    ],
    ids=["factor", "near one", "order", "other"],
)
def test_describes_difference_of_arrays(wrong, text):
    assert diagnosis.how_it_differs(wrong, VALUE).startswith(text)


# Loss, weight and evaluation


def sums(total=10.0, weight=4.0, **gradients):
    return Sums(total, weight, gradients)


def test_broken_contract_explains_all_differences():
    broken = case("The model: so and so.")
    assert diagnosis.explain_loss(broken, sums(20.0), sums()) == "The model: so and so."
    assert diagnosis.explain_gradient(broken, "first", sums(), sums(), (1.0, 1.0)) == "The model: so and so."
    assert diagnosis.explain_evaluation(broken, (1.0, 1.0), (2.0, 1.0), None, {}) == "The model: so and so."


def test_reports_measured_loss_and_weight_without_cause():
    text = diagnosis.explain_loss(case(), sums(weight=48.0), sums(weight=12.0))
    assert text == "It is divided by a weight of 48, and one device by 12."
    text = diagnosis.explain_loss(case(), sums(total=9.8), sums())
    assert text == "The weight is right; the sum of the losses is 0.98 times the reference."


# Gradients and their norm

ARRAYS = {"first": np.arange(256.0).reshape(16, 16), "scale": np.arange(16.0), "second": np.ones((16, 8))}


def of_gradient(path, wrong):
    found = {name: on_mesh(leaf) for name, leaf in ARRAYS.items()}
    return diagnosis.explain_gradient(case(), path, sums(**{**found, path: wrong}), sums(**ARRAYS), (2.0, 1.0))


def test_formats_factor_of_all_gradients():
    found = {name: on_mesh(3 * leaf) for name, leaf in ARRAYS.items()}
    text = diagnosis.explain_gradient(case(), "first", sums(**found), sums(**ARRAYS), (1.0, 1.0))
    assert text == "Every gradient is 3 times the reference; the norm that the step reports is right."
    text = diagnosis.explain_gradient(case(), "first", sums(**found), sums(**ARRAYS), (3.0, 1.0))
    assert text.endswith("the norm that the step reports is 3 times the reference as well.")


def copies(leaf, *shares):
    """An array that should be the same on all four devices, of which each holds another share."""
    sharding = NamedSharding(layouts().mesh.backend_mesh, PartitionSpec())
    devices = layouts().mesh.backend_mesh.devices.flat
    arrays = [jax.device_put(np.float32(leaf * share), device) for share, device in zip(shares, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)


def test_replicas_that_add_up_are_missing_sum():
    text = of_gradient("scale", copies(ARRAYS["scale"], 0.25, 0.25, 0.75, 0.75))
    assert "Devices along data hold different values, and their sum is the reference: a missing psum over data" in text
    text = of_gradient("scale", copies(ARRAYS["scale"], 0.5, 0.5, 0.75, 0.25))
    assert text.startswith("Devices along data x fsdp hold different values of what must be the same.")


def test_describes_gradient_that_all_devices_agree_on():
    text = of_gradient("first", on_mesh(ARRAYS["first"].T, ("fsdp",)))
    assert text == "The same numbers in other places. Its layout is (fsdp, None)."


# Initial parameters and refusals


def test_describes_different_initial_parameters():
    class Drawn:
        def init(self, dtype):
            return ARRAYS

    params = {**ARRAYS, "first": ARRAYS["first"].T}
    text = diagnosis.explain_init(Case(layouts(), 1, None, params, Drawn(), {}), "first")
    assert text == "The same seed draws other parameters on this mesh: the same numbers in other places."


ROWS = 8
LOSSES = np.arange(1.0, ROWS + 1)


class Reference:
    """One device, on which each row counts once."""

    def sums(self, params, batch):
        return counted(batch, np.ones(ROWS))


def counted(batch, times):
    """What a step sums up that counts row n `times[n]` times."""
    weights = np.asarray(batch["weights"]) * times
    return Sums(float(weights @ LOSSES), float(weights.sum()), {"up": (weights @ LOSSES) * np.ones((4, 2))})


def rows_case(times, microbatches=1, **batch):
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
def test_names_rows_by_common_place(rows, count, microbatches, text):
    assert of_rows(rows_case(times(*rows, count=count), microbatches), None) == text


TWO = times(2, count=0) + times(3, count=2) - 1


@pytest.mark.parametrize("wrong", [np.ones(ROWS), times(1, count=1.5), TWO], ids=["right", "half", "two"])
def test_reports_nothing_for_complex_cases(wrong):
    assert of_rows(rows_case(wrong), None) == ""


def test_runs_nothing_without_weights_or_with_many_rows():
    def run(params, batch):
        raise AssertionError

    many = Case(layouts(), 1, run, {}, Reference(), {"weights": np.ones(65)})
    without = Case(layouts(), 1, run, {}, Reference(), {"inputs": np.ones(8)})
    assert of_rows(many, None) == of_rows(without, None) == ""


def test_finds_rows_of_one_gradient():
    assert of_rows(rows_case(times(3)), "up") == "row 3 of 8 is not counted."

    def run(params, batch):
        found = counted(batch, times(3))
        return found._replace(gradients={"up": found.gradients["up"] + np.arange(8.0).reshape(4, 2)})

    assert of_rows(replace(rows_case(times(3)), run=run), "up") == "", "no multiple of the reference"


def test_names_stage_of_pipeline():
    """One block on each of three stages; the gradient of the second is wrong."""
    layouts = lay_out(BLOCK_MODEL, {"pipe": PipelineConfig(size=3, microbatches=3)}, devices=toy.devices(3))
    found, expected = Case(layouts, 1, None, None, None, {}), np.ones((3, 2))
    value = expected * np.array([[1.0], [2.0], [1.0]])
    assert of_stages(found, "blocks/up", value, expected) == "it is wrong on stage 1 of pipe alone."
    assert of_stages(found, "blocks/up", 2 * expected, expected) == "", "all stages are wrong"
    assert of_stages(found, "head/out", value, expected) == "", "it is on every stage"
    assert of_stages(rows_case(times(3)), "first", value, expected) == "", "there are no stages"


BEFORE, MOVED = np.array([1.0, 2.0, 4.0]), np.array([-0.1, 0.3, -0.2])


@pytest.mark.parametrize(
    ("moved", "text"),
    [
        (0 * MOVED, "w does not move."),
        (3 * MOVED, "its change is 3 times the reference in every element."),
        (MOVED - 0.01 * BEFORE, "w has -0.01 times itself added, beyond the update of one device."),
        (MOVED[::-1], "its change is the same numbers in other places."),
        (MOVED + np.array([0.0, 0.5, 0.1]), "its change is no multiple of the reference."),
        (MOVED, "w is right after the first update that is wrong."),
    ],
    ids=["still", "far", "decayed", "ordered", "other", "right"],
)
def test_describes_parameter_change(moved, text):
    assert diagnosis._of_update("w", BEFORE, BEFORE + moved, BEFORE + MOVED) == text
