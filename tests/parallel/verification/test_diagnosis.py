"""Causes of differences: factors, replicas, rows that do not count once."""

from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from spmdkit.layouts.tensor_layout import TensorLayout
from spmdkit.parallel import lay_out
from spmdkit.parallel.verification import diagnosis
from spmdkit.parallel.verification.reference import Sums
from support import toy
from support.verification import MESH, MODEL


@cache
def layouts():
    return lay_out(MODEL, MESH, devices=toy.devices(4))


class Case(SimpleNamespace):
    """A case whose contract is given, and a batch without weights."""

    contract, tolerance, params, batches = "", 1e-9, None, ({},)

    def layout(self, path):
        return next(row.layout for row in layouts().update_table.rows if row.path == path)

    def first_state(self):
        return None


def sums(total=10.0, weight=4.0, **gradients):
    return Sums(total, weight, gradients)


VALUE = np.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (0 * VALUE, "zero."),
        (4 * VALUE, "4 times the reference in every element."),
        ((1 - 3e-6) * VALUE, "1 - 3.0e-06 times the reference in every element."),
        (VALUE.T.reshape(2, 3), "the same numbers in other places."),
        (VALUE + 1, "no multiple of the reference."),
    ],
    ids=["zero", "factor", "near one", "order", "other"],
)
def test_describes_difference_of_arrays(wrong, text):
    assert diagnosis.how_it_differs(wrong, VALUE) == text


def test_broken_contract_explains_all_differences():
    broken = Case(contract="The model: so and so.")
    assert diagnosis.explain_loss(broken, sums(20.0), sums()) == broken.contract
    assert diagnosis.explain_gradient(broken, "first", sums(), sums(), (1.0, 1.0)) == broken.contract
    assert diagnosis.explain_evaluation(broken, None, {}, sums(), sums(9.0)) == broken.contract


def test_reports_measured_loss_and_weight_without_cause():
    text = diagnosis.explain_loss(Case(), sums(weight=48.0), sums(weight=12.0))
    assert text == "The weight is 48, and 12 on one device: 4 times the reference."
    text = diagnosis.explain_loss(Case(), sums(total=9.8), sums())
    assert text == "The sum of the losses is 9.8, and 10 on one device: 0.98 times the reference."
    assert diagnosis.explain_loss(Case(), sums(), sums(float("nan"))).startswith("It is nan on one device as well")


ARRAYS = {"first": np.arange(256.0).reshape(16, 16), "scale": np.arange(16.0), "second": np.ones((16, 8))}


def on_mesh(whole, spec=()):
    mesh = layouts().mesh.backend_mesh
    return jax.device_put(jnp.asarray(whole, jnp.float32), NamedSharding(mesh, PartitionSpec(*spec)))


def explain(norm=2.0, **wrong):
    found = {name: on_mesh(leaf) for name, leaf in ARRAYS.items()} | wrong
    (path, *_) = wrong
    return diagnosis.explain_gradient(Case(), path, sums(**found), sums(**ARRAYS), (norm, 1.0))


def test_formats_factor_of_all_gradients():
    found = {name: on_mesh(3 * leaf) for name, leaf in ARRAYS.items()}
    assert explain(1.0, **found) == "Every gradient is 3 times the reference; the norm that the step reports is right."
    assert explain(3.0, **found).endswith("the norm that the step reports is 3 times the reference as well.")


def copies(leaf, *shares):
    """An array that should be the same on all four devices, of which each holds another share."""
    sharding = NamedSharding(layouts().mesh.backend_mesh, PartitionSpec())
    devices = layouts().mesh.backend_mesh.devices.flat
    arrays = [jax.device_put(np.float32(leaf * share), device) for share, device in zip(shares, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)


def test_replicas_that_add_up_are_missing_sum():
    text = explain(scale=copies(ARRAYS["scale"], 0.25, 0.25, 0.75, 0.75))
    assert text == (
        "Devices along data hold different values, and their sum is the reference: a missing psum over data. Its "
        f"layout is {TensorLayout((None,), layouts().mesh)}."
    )
    text = explain(scale=copies(ARRAYS["scale"], 0.5, 0.5, 0.75, 0.25))
    assert text.startswith("Devices along data x fsdp hold different values, and they must be the same.")


def test_describes_gradient_that_all_devices_agree_on():
    text = explain(first=on_mesh(ARRAYS["first"].T, ("fsdp",)))
    assert text == "It is the same numbers in other places. Its layout is (fsdp, None)."


ROWS = 8
LOSSES = np.arange(1.0, ROWS + 1)


def counted(batch, times):
    """The sums of a step that counts row n `times[n]` times."""
    weights = np.asarray(batch["weights"]) * times
    return Sums(float(weights @ LOSSES), float(weights.sum()), {"up": (weights @ LOSSES) * np.ones((4, 2))})


def rows_case(times, noise=0.0, rows=ROWS):
    def run(state, batch):
        found = counted(batch, times)
        return found._replace(gradients={"up": found.gradients["up"] + noise}), 1.0

    one_device = SimpleNamespace(sums=lambda params, batch: counted(batch, np.ones(ROWS)))
    return Case(sums=run, one_device=one_device, batches=[{"weights": np.full(rows, 0.5, np.float32)}])


def times(*rows, count=0):
    each = np.ones(ROWS)
    each[list(rows)] = count
    return each


TWO = times(2, count=0) + times(3, count=2) - 1


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (times(2), "Rows 2 of 8 are not counted."),
        (times(1, 6, count=2), "Rows 1, 6 of 8 count 2 times."),
        (np.ones(ROWS), ""),
        (2 * np.ones(ROWS), ""),
        (times(1, count=1.5), ""),
        (TWO, ""),
    ],
    ids=["not", "twice", "right", "all", "half", "two"],
)
def test_names_rows_that_do_not_count_once(wrong, text):
    assert diagnosis.miscounted_rows(rows_case(wrong)) == text


def test_finds_rows_of_one_gradient():
    assert diagnosis.miscounted_rows(rows_case(times(3)), "up") == "Rows 3 of 8 are not counted."
    other = rows_case(times(3), noise=np.arange(8.0).reshape(4, 2))
    assert diagnosis.miscounted_rows(other, "up") == "", "no multiple of the reference"


def test_runs_nothing_without_weights_or_with_many_rows():
    assert diagnosis.miscounted_rows(rows_case(None, rows=65)) == diagnosis.miscounted_rows(Case()) == ""
