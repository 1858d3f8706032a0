"""The factor multiplies the update, whatever the optimizer; it changes on the host, laid out as before."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.models.mlp import MLPConfig, mlp
from spmdkit.parallel import FSDPConfig
from spmdkit.parallel.data import DataParallelConfig
from spmdkit.parallel.step.state import TrainState
from spmdkit.training.callbacks.rate_factor import adjustable, factor_of, with_factor

import spmdkit

GRADIENTS = {"w": jnp.float32([0.5, -2.0])}
PARAMS = {"w": jnp.float32([1.0, 3.0])}


@pytest.mark.parametrize("make", [lambda: optax.sgd(0.1), lambda: optax.adamw(0.1, weight_decay=0.3)])
def test_it_multiplies_the_update(make):
    plain, _ = make().update(GRADIENTS, make().init(PARAMS), PARAMS)
    optimizer = adjustable(make())
    state = TrainState(jnp.int32(0), PARAMS, optimizer.init(PARAMS), jnp.zeros(2, jnp.uint32))
    assert factor_of(state) == 1.0
    for factor in (1.0, 0.25):
        state = with_factor(state, factor)
        found, _ = optimizer.update(GRADIENTS, state.opt_state, PARAMS)
        np.testing.assert_allclose(found["w"], factor * plain["w"], rtol=1e-6)


def test_a_state_without_one():
    assert factor_of(TrainState(jnp.int32(0), PARAMS, optax.adam(1.0).init(PARAMS), jnp.zeros(2))) is None


STRATEGIES = {
    "fsdp": {"fsdp": FSDPConfig(size=8, floor_bytes=64)},
    "local steps": {"data": DataParallelConfig(size=8, local_steps=2)},  # each group has a factor of its own
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_compiled_step_takes_it(name):
    model = mlp(MLPConfig(features=8, widths=(8,), classes=4))
    plan = spmdkit.lay_out(model, STRATEGIES[name])
    step = spmdkit.build_step(model, adjustable(optax.sgd(1e-3)), plan)
    batch = {"inputs": np.ones((8, 8), np.float32), "targets": np.zeros(8, np.int32), "weights": np.ones(8, np.float32)}
    batch = jax.device_put({**batch, "example": np.arange(8, dtype=np.int32)}, plan.batch_sharding())
    moved = []
    for factor in (1.0, 0.5):
        state = with_factor(step.init(0), factor)
        before = jax.tree.map(np.asarray, state.params)
        for _ in range(2):  # then groups meet
            state, _ = step(state, batch)
        assert factor_of(state) == factor
        moved.append(jax.tree.map(lambda new, old: np.asarray(new) - old, state.params, before))
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(moved[0])) > 5e-4
    jax.tree.map(lambda half, whole: np.testing.assert_allclose(half, whole / 2, atol=1e-5), moved[1], moved[0])
