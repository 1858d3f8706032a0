"""A step under DiLoCo: groups start at the shared parameters and train apart until a round ends."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.parallel import DataParallelConfig, Model, build_step, lay_out
from spmdkit.parallel.step.state import TrainState
from spmdkit.parallel.step.update import start_copies
from support import toy

RATE = 0.1


def loss(params, batch, key):
    return (batch["weights"] * batch["x"]).sum() * params["w"].sum(), batch["weights"].sum()


MODEL = Model(init=lambda key: {"w": jnp.ones(4)}, loss=loss)
BATCH = {"x": np.array([1.0, 2.0, 5.0, 7.0], np.float32), "weights": np.array([1, 1, 1, 3], np.float32)}
SLOPES = np.array([1.5, 26 / 4])
"""Of each group's own rows: the mean, by its own weight."""


@cache
def states(local_steps=2):
    """The state after 0, 1 and 2 steps, and what the steps report."""
    config = DataParallelConfig(size=2, local_steps=local_steps, outer_learning_rate=1.0, outer_momentum=0.0)
    plan = lay_out(MODEL, {"data": config}, devices=toy.devices(2))
    step = build_step(MODEL, optax.sgd(RATE), plan)
    state, found, reported = step.init(0), [], []
    for _ in range(2):
        found.append(jax.device_get(state))
        state, metrics = step(state, BATCH)
        reported.append(jax.device_get(metrics))
    return [*found, jax.device_get(state)], reported


def test_every_group_starts_at_the_shared_parameters():
    params = {"w": jnp.arange(3.0)}
    state = start_copies(TrainState(jnp.int32(0), params, (), jnp.zeros(2)), optax.adam(1e-3), 2)
    assert state.extra.copies["w"].tolist() == [[0, 1, 2]] * 2
    assert state.extra.momentum["w"].tolist() == [0, 0, 0]
    assert state.opt_state[0].mu["w"].shape == (2, 3)
    assert state.params is params


@pytest.mark.slow
def test_within_a_round_each_trains_on_its_own_rows():
    first = states()[0][1]
    assert np.allclose(first.extra.copies["w"], 1 - RATE * SLOPES[:, None])
    assert np.array_equal(first.params["w"], np.ones(4))


def test_at_its_end_the_shared_ones_move_to_the_mean_and_all_start_there():
    last = states()[0][2]
    mean = 1 - 2 * RATE * SLOPES.mean()
    assert np.allclose(last.params["w"], mean)
    assert np.allclose(last.extra.copies["w"], mean)
    assert int(last.step) == 2


def test_metrics_are_those_of_all_rows():
    metrics = states()[1][0]
    assert np.allclose([metrics.loss, metrics.weight], [4 * 29 / 6, 6])
    assert np.allclose(metrics.grad_norm, 2 * SLOPES.mean()), "the mean of the groups' norms"
