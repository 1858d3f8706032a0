"""The factor multiplies the update, whatever the optimizer; it changes on the host, laid out as before."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.models.mlp import MLPConfig, mlp
from spmdkit.parallel import FSDPConfig
from spmdkit.parallel.data import DataParallelConfig
from spmdkit.parallel.step.state import TrainState
from spmdkit.training.callbacks.callback import Requests, Run
from spmdkit.training.callbacks.rate_factor import LEARNING_RATE, adjustable, factors_of, in_parts, with_factors

import spmdkit

GRADIENTS = {"w": jnp.float32([0.5, -2.0])}
PARAMS = {"w": jnp.float32([1.0, 3.0])}


@pytest.mark.parametrize("make", [lambda: optax.sgd(0.1), lambda: optax.adamw(0.1, weight_decay=0.3)])
def test_factor_multiplies_the_update(make):
    plain, _ = make().update(GRADIENTS, make().init(PARAMS), PARAMS)
    optimizer = adjustable(make())
    state = TrainState(jnp.int32(0), PARAMS, optimizer.init(PARAMS), jnp.zeros(2, jnp.uint32))
    assert factors_of(state) == {LEARNING_RATE: 1.0}
    for factor in (1.0, 0.25):
        state = with_factors(state, {LEARNING_RATE: factor})
        found, _ = optimizer.update(GRADIENTS, state.opt_state, PARAMS)
        np.testing.assert_allclose(found["w"], factor * plain["w"], rtol=1e-6)


def test_state_without_a_factor():
    assert factors_of(TrainState(jnp.int32(0), PARAMS, optax.adam(1.0).init(PARAMS), jnp.zeros(2))) == {}


STRATEGIES = {
    "fsdp": {"fsdp": FSDPConfig(size=8, floor_bytes=64)},
    "local steps": {"data": DataParallelConfig(size=8, local_steps=2)},  # each group has a factor of its own
}


@pytest.mark.slow_cases("fsdp", "local steps")
@pytest.mark.parametrize("name", STRATEGIES)
def test_compiled_step_applies_the_factor(name):
    model = mlp(MLPConfig(features=8, widths=(8,), classes=4))
    plan = spmdkit.lay_out(model, STRATEGIES[name])
    step = spmdkit.build_step(model, adjustable(optax.sgd(1e-3)), plan)
    batch = {"inputs": np.ones((8, 8), np.float32), "targets": np.zeros(8, np.int32), "weights": np.ones(8, np.float32)}
    batch = jax.device_put({**batch, "example": np.arange(8, dtype=np.int32)}, plan.batch_sharding())
    moved = []
    for factor in (1.0, 0.5):
        state = with_factors(step.init(0), {LEARNING_RATE: factor})
        before = jax.tree.map(np.asarray, state.params)
        for _ in range(2):  # then groups meet
            state, _ = step(state, batch)
        assert factors_of(state) == {LEARNING_RATE: factor}
        moved.append(jax.tree.map(lambda new, old: np.asarray(new) - old, state.params, before))
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(moved[0])) > 5e-4
    jax.tree.map(lambda half, whole: np.testing.assert_allclose(half, whole / 2, atol=1e-5), moved[1], moved[0])


def test_rejects_a_part_with_the_name_of_the_factor_on_all_updates():
    with pytest.raises(UserError, match="in_parts: 'learning_rate' is the name of the factor on all updates"):
        in_parts(optax.sgd(0.1), {LEARNING_RATE: "body/.*"})


def test_parts_train_by_their_factors():
    params = {"body": {"w": jnp.float32([1.0, 3.0])}, "head": jnp.float32([2.0])}
    gradients = {"body": {"w": jnp.float32([0.5, -2.0])}, "head": jnp.float32([1.0])}
    plain, _ = optax.adamw(0.1, weight_decay=0.3).update(gradients, optax.adamw(0.1).init(params), params)
    optimizer = in_parts(optax.adamw(0.1, weight_decay=0.3), {"body": "body/.*", "nothing else": "body/w"})
    state = TrainState(jnp.int32(0), params, optimizer.init(params), jnp.zeros(2, jnp.uint32))
    assert factors_of(state) == {"body": 0.0, "nothing else": 0.0}
    for factors, expected in (({}, 0.0), ({"nothing else": 1.0}, 0.0), ({"body": 0.5}, 0.5)):
        state = with_factors(state, factors)
        found, _ = optimizer.update(gradients, state.opt_state, params)
        np.testing.assert_allclose(found["body"]["w"], expected * plain["body"]["w"], rtol=1e-6)
        np.testing.assert_array_equal(found["head"], plain["head"])
    assert factors_of(state) == {"body": 0.5, "nothing else": 1.0}


def test_callback_changes_a_part():
    asked = []
    run = Run(folder=Path(), start=0, num_steps=1, parts={"body": 0.0}, on_request=asked.append)
    run.train_part("body")
    run.train_part("body", 0)
    assert asked == [Requests(parts={"body": 1.0}), Requests(parts={"body": 0.0})]
    with pytest.raises(UserError, match=r"train_part\('bdy'\): the optimizer has body\. Make it in_parts"):
        run.train_part("bdy")
    with pytest.raises(UserError, match="the factor must be a non-negative, finite number"):
        run.train_part("body", -0.5)


def test_rejects_parts_without_parameters():
    with pytest.raises(UserError, match=r"in_parts.*'wx'"):
        in_parts(optax.sgd(0.1), {"body": "wx"}).init(PARAMS)
