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


# Ratios and orders


@pytest.mark.parametrize(
    ("ratio", "lacking", "text"),
    [
        (2, (), "2 times too large, as when summed twice over data (size 2)."),
        (4, (), "4 times too large, as when summed twice over fsdp (size 4)."),
        (8, (), "8 times too large, as when summed twice over data x fsdp (sizes multiply to 8)."),
        (1 / 4, (), "4 times too small, as when averaged instead of summed, or a missing psum, over fsdp (size 4)."),
        (3, (), "3 times the reference everywhere: a wrong weight or divisor."),
        (1 + 1e-5, (), ""),
    ],
)
def test_a_ratio_names_axes(ratio, lacking, text):
    assert diagnosis.of_ratio(ratio, SIZES, lacking) == text


def test_axes_that_the_layout_lacks_are_the_first_suspects():
    sizes = {"data": 2, "fsdp": 2, "tensor": 4}
    assert "over data (" in diagnosis.of_ratio(2, sizes, ())
    assert "over fsdp (" in diagnosis.of_ratio(2, sizes, ("fsdp",))
    assert "over tensor (" in diagnosis.of_ratio(4, sizes, ("tensor",))
    assert "over data x fsdp (" in diagnosis.of_ratio(4, sizes, ("data", "fsdp"))


def test_the_same_numbers_in_another_order():
    value = np.arange(6.0).reshape(2, 3)
    assert diagnosis.of_order(value.T.reshape(2, 3), value).startswith("the same numbers in other places")
    assert diagnosis.of_order(value, value) == ""
    assert diagnosis.of_order(value + 1, value) == ""


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


def test_a_mean_of_means_is_divided_by_the_number_of_shards():
    text = diagnosis.of_loss(case(), sums(weight=4.0), sums(weight=12.0))
    assert "divided by a weight of 4, and one device by 12: a mean of 4 means" in text


def test_a_weight_that_is_a_multiple():
    text = diagnosis.of_loss(case(layouts=layouts(4, 1)), sums(weight=48.0), sums(weight=12.0))
    assert "a weight of 48, and one device by 12: 4 times too large, as when summed twice over data (size 4)" in text
    text = diagnosis.of_weight(case(layouts=layouts(4, 1)), 48.0, 12.0)
    assert "It is 48, and 12 on one device; the mean is right, the sums are not. 4 times too large" in text


def test_an_evaluation_that_draws_is_told_from_one_that_sums_wrongly():
    class Random:
        def sums(self, params, batch):
            return sums(total=7.0)

    drawn = Case(layouts(), 1, None, None, Random(), {})
    drawn.__dict__["contract"] = ""
    assert "random numbers of step 0: an evaluation has none" in diagnosis.of_evaluation(drawn, (7, 4), (5, 4), {}, {})
    text = diagnosis.of_evaluation(drawn, (10, 4), (5, 4), {}, {})
    assert text == "The sum of the losses is 10, and 5 on one device: 2 times as large."
    assert diagnosis.of_evaluation(drawn, (5, 2), (5, 4), {}, {}).startswith("The weight is 2, and 4 on one device")


# Gradients and their norm

ARRAYS = {"first": np.arange(256.0).reshape(16, 16), "scale": np.arange(16.0), "second": np.ones((16, 8))}


def of_gradient(path, wrong, *, norms=(2.0, 1.0)):
    found = {name: on_mesh(leaf) for name, leaf in ARRAYS.items()}
    return diagnosis.of_gradient(case(), path, sums(**{**found, path: wrong}), sums(**ARRAYS), norms)


def test_all_gradients_alike_and_the_norm_is_right():
    found = {name: on_mesh(3 * leaf) for name, leaf in ARRAYS.items()}
    text = diagnosis.of_gradient(case(), "first", sums(**found), sums(**ARRAYS), (1.0, 1.0))
    assert text.startswith("Every gradient is 3 times the reference, while the norm that the step reports is right")
    text = diagnosis.of_gradient(case(), "first", sums(**found), sums(**ARRAYS), (3.0, 1.0))
    assert text.startswith("3 times the reference everywhere: a wrong weight or divisor.")


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
        (2 * ARRAYS["first"], "2 times too large, as when summed twice over data (size 2)."),
        (ARRAYS["first"].T, "The same numbers in other places"),
        (ARRAYS["first"] ** 1.5, "It is no multiple of the reference; on average"),
    ],
)
def test_a_gradient_that_all_devices_agree_on(wrong, text):
    said = of_gradient("first", on_mesh(wrong, ("fsdp",)))
    assert said.startswith(text)
    assert said.endswith("Its layout (fsdp, None) lacks data: over these its gradient has to be summed, once.")


def test_of_a_norm_the_squares_that_are_counted_wrongly():
    squares = {name: float(np.sum(leaf**2)) for name, leaf in ARRAYS.items()}
    whole, split = squares["scale"], squares["first"] + squares["second"]
    assert diagnosis.of_norm(case(), (split + 2 * whole) ** 0.5, (split + whole) ** 0.5, ARRAYS) == (
        "The squares of gradients that every device holds whole are counted 2 times."
    )
    assert "squares of gradients split over fsdp only a part is counted (0.5 of them): a missing psum" in (
        diagnosis.of_norm(case(), (split / 2 + whole) ** 0.5, (split + whole) ** 0.5, ARRAYS)
    )
    assert diagnosis.of_norm(case(), 1.5 * (split + whole) ** 0.5, (split + whole) ** 0.5, ARRAYS).startswith(
        "It is 1.5"
    )


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
    assert told("scale", ARRAYS["scale"] * 1.5 + 1).endswith("in all of scale.")


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
