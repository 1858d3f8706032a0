"""What an update moves: ZeRO's gathers as predicted, and whatever an optimizer that looks across elements adds."""

from functools import cache

import jax
import jax.numpy as jnp
import optax
import pytest
import toy
from spmdkit.parallel import DataParallelConfig, FSDPConfig, Model, build_step, lay_out
from spmdkit.parallel.collectives import Collective
from spmdkit.parallel.verification.update_traffic import looks_across, predicted_of_update, traffic_of_update

SIZE = 64
MODEL = Model(
    init=lambda key: {"w": jnp.full((SIZE, SIZE), 0.1)},
    loss=lambda params, batch, key: (((batch["x"] @ params["w"]) ** 2).sum(), batch["weights"].sum()),
)
STRATEGIES = {
    "data": {"data": 2},
    "zero": {"data": DataParallelConfig(size=2, zero=1, floor_bytes=1)},
    "fsdp": {"fsdp": FSDPConfig(size=2, floor_bytes=1)},
}
ACROSS = optax.stateless(
    lambda updates, params: jax.tree.map(lambda leaf: leaf - leaf.mean(axis=0, keepdims=True), updates)
)
SORTED = optax.stateless(lambda updates, params: jax.tree.map(lambda leaf: jnp.sort(leaf, axis=0), updates))


@cache
def step(strategy, optimizer):
    return build_step(MODEL, optimizer, lay_out(MODEL, STRATEGIES[strategy], devices=toy.devices(2)))


ADAM, SGD = optax.adamw(1e-3), optax.sgd(0.1)


def test_zero_gathers_what_it_updated():
    gathers = (Collective("all-gather", ("data",), 1, 4 * SIZE * SIZE),)
    assert predicted_of_update(step("zero", SGD)) == gathers
    assert traffic_of_update(step("zero", SGD)) == gathers


@pytest.mark.parametrize("strategy", ["data", "fsdp"])
def test_without_zero_an_update_moves_nothing(strategy):
    assert predicted_of_update(step(strategy, SGD)) == ()
    assert traffic_of_update(step(strategy, SGD)) == ()


def test_an_optimizer_that_looks_across_elements_moves_more():
    (line,) = traffic_of_update(step("fsdp", ACROSS))
    assert (line.kind, line.axes) == ("all-reduce", ("fsdp",))


@pytest.mark.parametrize(
    ("optimizer", "across"),
    [(SGD, False), (ADAM, False), (ACROSS, True), (SORTED, True)],
    ids=["sgd", "adam", "mean", "sort"],
)
def test_whether_an_optimizer_looks_across_elements(optimizer, across):
    """Operations that change shapes, and those that do not and look across all the same."""
    assert looks_across(step("fsdp", optimizer)) == across
