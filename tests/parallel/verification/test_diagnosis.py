"""From a difference to its usual cause, on made numbers; `test_compare.py` plants the mistakes themselves."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.sharding import NamedSharding, PartitionSpec
from planted import MODEL
from spmdkit.parallel import FSDPConfig, lay_out
from spmdkit.parallel.verification import diagnosis
from spmdkit.parallel.verification.reference import Sums
from spmdkit.parallel.verification.row_counts import Case

SIZES = {"data": 2, "fsdp": 4}


@cache
def layouts(data=2, fsdp=2):
    return lay_out(MODEL, {"data": data, "fsdp": FSDPConfig(size=fsdp, floor_bytes=512)}, devices=toy.devices(4))


def case(**changed):
    """A model that keeps its contract, and a batch in which no row stands out."""
    made = Case(changed.pop("layouts", layouts()), 1, None, None, None, {})
    made.__dict__["contract"] = changed.pop("contract", "")  # else it would be measured
    return made


def on_mesh(whole, spec=()):
    mesh = layouts().mesh.backend_mesh
    return jax.device_put(jnp.asarray(whole, jnp.float32), NamedSharding(mesh, PartitionSpec(*spec)))


# Factors and orders


@pytest.mark.parametrize("times", [4.0, 0.5])
def test_a_uniform_factor_is_a_measurement_without_a_cause(times):
    """A loss scale, a sum done twice and a wrong divisor look the same; nor is it the same numbers in other places."""
    value = np.arange(6.0).reshape(2, 3)
    assert diagnosis.how_it_differs(times * value, value) == f"{times:g} times the reference in every element."


def test_a_factor_near_to_1_is_told_with_the_digits_that_tell_it_from_1():
    value = np.arange(6.0).reshape(2, 3)
    text = diagnosis.how_it_differs((1 + 3e-6) * value, value)
    assert text == "1 + 3.0e-06 times the reference in every element."
    found = {name: (1 - 3e-6) * leaf for name, leaf in ARRAYS.items()}
    assert diagnosis.digits(diagnosis._of_all(found, ARRAYS)) == "1 - 3.0e-06"


def test_the_same_numbers_in_another_order():
    value = np.arange(6.0).reshape(2, 3)
    assert diagnosis.how_it_differs(value.T.reshape(2, 3), value) == "the same numbers in other places."
    assert diagnosis.how_it_differs(value + 1, value).startswith("no multiple of the reference; on average")


def test_axes_in_words():
    assert [diagnosis.named(axes) for axes in ((), ("data",), ("data", "fsdp"))] == ["no axis", "data", "data x fsdp"]


# Loss, weight and evaluation


def sums(total=10.0, weight=4.0, **gradients):
    return Sums(total, weight, gradients)


def test_a_loss_that_is_not_finite_is_the_models_own():
    assert "the model itself, not the strategy" in diagnosis.of_loss(case(contract="x"), sums(), sums(np.nan))


def test_a_broken_contract_explains_everything_else():
    broken = case(contract="The model: so and so.")
    assert diagnosis.of_loss(broken, sums(20.0), sums()) == "The model: so and so."
    assert diagnosis.of_gradient(broken, "first", sums(), sums(), (1.0, 1.0)) == "The model: so and so."
    assert diagnosis.of_evaluation(broken, (1.0, 1.0), (2.0, 1.0), None, {}) == "The model: so and so."


def test_a_weight_that_differs_is_a_measurement():
    text = diagnosis.of_loss(case(), sums(weight=48.0), sums(weight=12.0))
    assert text == "It is divided by a weight of 48, and one device by 12."
    text = diagnosis.of_weight(48.0, 12.0)
    assert text.startswith("It is 48, and 12 on one device: 4 times the reference.")


def test_a_loss_that_differs_alone_is_a_measurement():
    """Nothing has shown that a weight, a divisor or a parameter is wrong."""
    text = diagnosis.of_loss(case(), sums(total=9.8), sums())
    assert text == "The weight is right; the sum of the losses is 0.98 times the reference."


def test_an_evaluation_that_draws_is_told_from_one_that_sums_wrongly():
    class Random:
        def sums(self, params, batch):
            return sums(total=7.0)

    drawn = Case(layouts(), 1, None, None, Random(), {})
    drawn.__dict__["contract"] = ""
    assert "random numbers of step 0: an evaluation has none" in diagnosis.of_evaluation(drawn, (7, 4), (5, 4), {}, {})
    text = diagnosis.of_evaluation(drawn, (10, 4), (5, 4), {}, {})
    assert text == "The sum of the losses is 10, and 5 on one device: 2 times the reference."
    assert diagnosis.of_evaluation(drawn, (5, 2), (5, 4), {}, {}).startswith("The weight is 2, and 4 on one device")


# Gradients and their norm

ARRAYS = {"first": np.arange(256.0).reshape(16, 16), "scale": np.arange(16.0), "second": np.ones((16, 8))}


def of_gradient(path, wrong, *, norms=(2.0, 1.0)):
    found = {name: on_mesh(leaf) for name, leaf in ARRAYS.items()}
    return diagnosis.of_gradient(case(), path, sums(**{**found, path: wrong}), sums(**ARRAYS), norms)


@pytest.mark.parametrize("times", [3.0, 1.25])
def test_a_factor_of_all_gradients_is_told_with_all_its_digits(times):
    found = {name: on_mesh(times * leaf) for name, leaf in ARRAYS.items()}
    text = diagnosis.of_gradient(case(), "first", sums(**found), sums(**ARRAYS), (1.0, 1.0))
    assert text == f"Every gradient is {times:g} times the reference; the norm that the step reports is right."
    text = diagnosis.of_gradient(case(), "first", sums(**found), sums(**ARRAYS), (times, 1.0))
    assert text.endswith(f"the norm that the step reports is {times:g} times the reference as well.")


def copies(leaf, *shares):
    """An array that should be the same on all four devices, of which each holds another share."""
    sharding = NamedSharding(layouts().mesh.backend_mesh, PartitionSpec())
    devices = layouts().mesh.backend_mesh.devices.flat
    arrays = [jax.device_put(np.float32(leaf * share), device) for share, device in zip(shares, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)


def test_copies_that_add_up_are_a_missing_sum():
    text = of_gradient("scale", copies(ARRAYS["scale"], 0.25, 0.25, 0.75, 0.75))
    assert "Devices along data hold different values, and their sum is the reference: a missing psum over data" in text
    text = of_gradient("scale", copies(ARRAYS["scale"], 0.5, 0.5, 0.75, 0.25))
    assert text.startswith("Devices along data x fsdp hold different values of what has to be the same.")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (2 * ARRAYS["first"], "2 times the reference in every element."),
        (ARRAYS["first"].T, "The same numbers in other places"),
        (ARRAYS["first"] ** 1.5, "No multiple of the reference; on average"),
    ],
)
def test_a_gradient_that_all_devices_agree_on(wrong, text):
    said = of_gradient("first", on_mesh(wrong, ("fsdp",)))
    assert said.startswith(text)
    assert said.endswith("Its layout is (fsdp, None).")


def test_a_norm_is_a_measurement():
    assert diagnosis.of_norm(1.5, 1.0) == "It is 1.5 times the reference, while every gradient is right."


# Initial parameters and refusals


def test_initial_parameters_that_differ():
    class Drawn:
        def init(self, dtype):
            return ARRAYS

    def told(path, leaf):
        return diagnosis.of_init(Case(layouts(), 1, None, {**ARRAYS, path: leaf}, Drawn(), {}), path)

    changed = ARRAYS["second"].copy()
    changed[3] += 1
    changed[11] -= 1
    assert told("second", changed).endswith("rows 3, 11 of the 16 of dim 0 alone.")
    assert "the same numbers in other places" in told("first", ARRAYS["first"].T)
    assert "in all of scale: no multiple of the reference" in told("scale", ARRAYS["scale"] * 1.5 + 1)


def test_what_jax_refuses_is_read(monkeypatch):
    text = (
        "shard_map applied to the function 'gradients' was given out_specs which require replication which can't be "
        "statically inferred given the mesh: out_specs[0]['blocks']['up'] is PartitionSpec('fsdp',), which implies the "
        "output is only varying across mesh axes {fsdp} and replicated over {data}, but it was varying over {data,fsdp}"
    )
    path, cause = diagnosis.refused(ValueError(text), layouts())
    assert path == "blocks/up"
    assert "along data, which have to hold the same: a missing psum over data." in cause
    assert diagnosis.refused(ValueError("out of memory"), layouts()) is None
