"""Causes of differences: factors, and replicas that differ."""

from functools import cache
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from spmdkit.parallel import lay_out
from spmdkit.parallel.verification import diagnosis
from spmdkit.parallel.verification.case import Contract
from spmdkit.parallel.verification.contract.breaches import Breach
from spmdkit.parallel.verification.reference import Sums
from support import toy
from support.verification import MESH, MODEL


@cache
def layouts():
    return lay_out(MODEL, MESH, devices=toy.devices(4))


class Case(SimpleNamespace):
    """A case whose contract is given."""

    contract = Contract()
    tolerance = 1e-9

    def layout(self, path):
        return next(row.layout for row in layouts().update_table.rows if row.path == path)


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
        (VALUE + 1, "not a multiple of the reference."),
    ],
    ids=["zero", "factor", "near one", "order", "other"],
)
def test_describes_difference_of_arrays(wrong, text):
    assert diagnosis.describe_difference(wrong, VALUE) == text


def test_broken_contract_explains_all_differences():
    broken = Case(contract=Contract((Breach("rows", "so and so."),)))
    text = "The model, not the strategy: on one device as well, so and so."
    assert diagnosis.explain_loss(broken, sums(20.0), sums()) == text
    assert diagnosis.explain_gradient(broken, "first", sums(), sums()) == text


def test_reports_measured_loss_and_weight_without_cause():
    text = diagnosis.explain_loss(Case(), sums(weight=48.0), sums(weight=12.0))
    assert text == "The weight is 48, and 12 on one device: 4 times the reference."
    text = diagnosis.explain_loss(Case(), sums(total=9.8), sums())
    assert text == "The sum of the losses is 9.8, and 10 on one device: 0.98 times the reference."
    assert diagnosis.explain_loss(Case(), sums(total=10 + 1e-7), sums()).endswith("1 + 1.0e-08 times the reference.")
    assert diagnosis.explain_loss(Case(), sums(), sums(float("nan"))).startswith("It is nan on one device as well")


ARRAYS = {"scale": np.arange(16.0)}


def copies(leaf, *shares):
    """An array that should be the same on all four devices, of which each holds another share."""
    sharding = NamedSharding(layouts().mesh.backend_mesh, PartitionSpec())
    devices = layouts().mesh.backend_mesh.devices.flat
    arrays = [jax.device_put(np.float32(leaf * share), device) for share, device in zip(shares, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)


def test_replicas_that_do_not_add_up_are_reported_without_cause():
    scale = copies(ARRAYS["scale"], 0.5, 0.5, 0.75, 0.25)
    text = diagnosis.explain_gradient(Case(), "scale", sums(scale=scale), sums(**ARRAYS))
    assert text.startswith("Devices along data x fsdp hold different values, and they must be the same.")
