"""Reduce-scatters that send a gradient in its own dtype; on simulated devices, where they are off, for the test."""

import jax
import numpy as np
import pytest
from spmdkit.mesh.targets import parse_target
from spmdkit.parallel import Precision, census, fsdp
from spmdkit.parallel.xla.platform import branches_of_gpus
from support import toy

from spmdkit import DeviceMesh

WIDENED = Precision(params="float64", compute="float32", reduce="float64")
LEFT = {"fsdp": {"size": 2, "floor_bytes": 512}, "tensor": {"size": 4, "explicit": False}}
BY_RULES = {"blocks/up": (None, "fsdp", "tensor"), "blocks/down": (None, "tensor", "fsdp")}


def gradients(strategy, rules=None):
    """Gradients of a step, and its collectives; the predicted ones are the same."""
    step = toy.build(strategy, rules=rules, precision=WIDENED)
    found = census(step.compile(toy.abstract(toy.batch(0))).as_text(), step.plan.mesh)
    if rules is None:
        assert found == step.cost(toy.abstract(toy.batch(0)))
    return step.gradients(step.init(0, jax.tree.map(np.float64, toy.first_params())), toy.batch(0))[0], found


@pytest.mark.slow_cases("tensor left to XLA")
@pytest.mark.parametrize(
    ("strategy", "rules"),
    [({"fsdp": {"size": 4, "floor_bytes": 256}}, None), (LEFT, BY_RULES)],
    ids=["fsdp", "tensor left to XLA"],
)
def test_sums_to_the_same_gradients_with_half_the_bytes(strategy, rules, float64):
    expected, wide = gradients(strategy, rules)
    with branches_of_gpus(across_hosts=True):
        found, narrow = gradients(strategy, rules)
    assert max(jax.tree.leaves(jax.tree.map(toy.relative, found, expected))) < 1e-14
    (scattered,) = (line for line in wide if line.kind == "reduce-scatter")
    (exchanged,) = (line for line in narrow if line.kind == "all-to-all")
    assert not any(line.kind == "reduce-scatter" for line in narrow)
    assert (2 * exchanged.bytes, exchanged.axes) == (scattered.bytes, ("fsdp",))


@pytest.mark.parametrize(
    ("target", "sizes", "axes", "expected"),
    [
        ("h100:1x8", {"fsdp": 8}, ("fsdp",), False),
        ("h100:16x8", {"fsdp": 16, "tensor": 8}, ("fsdp",), True),
        ("h100:16x8", {"data": 16, "fsdp": 8}, ("fsdp",), False),
        ("h100:16x8", {"data": 16, "fsdp": 8}, ("data",), True),
        ("h100:16x8", {"fsdp": 128}, ("fsdp",), False),
        ("h100:16x8", {"data": 4, "fsdp": 32}, ("fsdp",), False),
        ("h100:8x1", {"fsdp": 8}, ("fsdp",), False),
    ],
    ids=str,
)
def test_exchanges_between_devices_in_different_hosts(target, sizes, axes, expected):
    names = np.array(parse_target(target).device_names())
    mesh = DeviceMesh(tuple(sizes.values()), tuple(sizes), names.tolist())
    assert fsdp.exchanges(mesh, axes, "bfloat16", "float32") is expected
    assert not fsdp.exchanges(mesh, axes, "float32", "float32")
