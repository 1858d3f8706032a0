import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_optimizations import one_update, quadratic, stacked_params, train
from spmdkit.layouts.paths import leaves_with_paths
from spmdkit.training.optimizing.directions import DIRECTIONS
from spmdkit.training.optimizing.learning_rates import make_learning_rate
from spmdkit.training.optimizing.optimizers import OptimizerConfig, make_optimizer


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (OptimizerConfig(name="sgd", learning_rate=0.1), optax.sgd(0.1)),
        (OptimizerConfig(name="sgd", learning_rate=0.1, momentum=0.9), optax.sgd(0.1, momentum=0.9)),
        (OptimizerConfig(name="adam", learning_rate=0.1), optax.adam(0.1)),
        (OptimizerConfig(name="adamw", learning_rate=0.1, betas=(0.8, 0.9)), optax.adam(0.1, 0.8, 0.9)),
        (OptimizerConfig(name="adamw", epsilon=0.1), optax.adam(1e-3, eps=0.1)),
        (OptimizerConfig(name="lion", learning_rate=0.1), optax.lion(0.1, weight_decay=0.0)),
    ],
)
def test_same_updates_as_optax(config, expected):
    params = stacked_params()
    mine, theirs = make_optimizer(config, 10, params), expected
    states = mine.init(params), theirs.init(params)
    for seed in range(3):
        gradients = stacked_params(seed)
        (updates, state), (reference, other) = (
            optimizer.update(gradients, state, params) for optimizer, state in zip((mine, theirs), states, strict=True)
        )
        states = state, other
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9), updates, reference)


@pytest.mark.parametrize("name", [name for name in DIRECTIONS if name != "adam"])
def test_matrices_are_decayed_and_norms_are_not(name):
    """With gradients of zero the only update is -rate * decay * parameter, exactly."""
    params = stacked_params()
    config = OptimizerConfig(name=name, learning_rate=0.5, weight_decay=0.2)
    updates = one_update(config, params, jax.tree.map(jnp.zeros_like, params))
    np.testing.assert_array_equal(updates["blocks"]["norm"], 0)
    for path, update in leaves_with_paths(updates):
        if path != "blocks/norm":
            np.testing.assert_allclose(update, -0.1 * dict(leaves_with_paths(params))[path], rtol=1e-6)


def test_the_schedule_scales_every_update():
    params, gradients = stacked_params(), stacked_params(seed=1)
    config = OptimizerConfig(name="sgd", learning_rate=0.5, schedule={"name": "linear", "final_ratio": 0.2})
    optimizer, rates = make_optimizer(config, 5, params), make_learning_rate(config.learning_rate, config.schedule, 5)
    state = optimizer.init(params)
    for number in range(5):
        updates, state = optimizer.update(gradients, state, params)
        rate = float(rates(number))
        expected = jax.tree.map(lambda leaf, rate=rate: -rate * leaf, gradients)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), updates, expected)
    assert float(rates(0)) == 0.5 > float(rates(4)) > 0.1


def test_decay_skip():
    params = stacked_params()
    config = OptimizerConfig(name="sgd", learning_rate=1.0, weight_decay=0.1, decay_skip=("embed/.*",))
    updates = one_update(config, params, jax.tree.map(jnp.zeros_like, params))
    assert [path for path, leaf in leaves_with_paths(updates) if leaf.any()] == ["blocks/kernel", "head/logits"]
    with pytest.raises(ValueError, match=r"optimizer.decay_skip: 'embde/.*' matches no parameter"):
        make_optimizer(OptimizerConfig(decay_skip=("embde/.*",)), 10, params)


def test_stacked_can_be_said():
    params = {"blocks": {"norm": jnp.ones((2, 3))}}
    config = OptimizerConfig(name="sgd", weight_decay=0.1)
    zeros = jax.tree.map(jnp.zeros_like, params)
    for stacked, decayed in ((None, True), (True, False)):
        optimizer = make_optimizer(config, 10, params, stacked=stacked)
        assert optimizer.update(zeros, optimizer.init(params), params)[0]["blocks"]["norm"].any() == decayed


def test_decay_can_be_turned_on_in_a_resumed_run():
    """The state has the same leaves with and without decay."""
    params = stacked_params()
    states = [make_optimizer(OptimizerConfig(weight_decay=decay), 10, params).init(params) for decay in (0.0, 0.1)]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])


# The user's own


@pytest.fixture
def user_module(monkeypatch):
    module = types.ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", module)
    return lambda **objects: vars(module).update(objects)


def test_own_optimizer(user_module):
    def make(learning_rate, scale, num_steps):
        assert num_steps == 10
        return optax.chain(optax.scale(scale), optax.scale_by_learning_rate(learning_rate))

    user_module(make=make)
    config = OptimizerConfig(name="mine:make", learning_rate=0.5, options={"scale": 3.0})
    params = stacked_params()
    np.testing.assert_allclose(one_update(config, params, params)["head"]["logits"], -1.5 * params["head"]["logits"])


def test_optax_by_name():
    config = OptimizerConfig(name="optax:adabelief", learning_rate=0.1, options={"b1": 0.8})
    params, goal = stacked_params(), stacked_params(seed=1)
    assert quadratic(train(config, params, goal, 60), goal) < 0.1 * quadratic(params, goal)


def test_problems_of_own_optimizers(user_module):
    user_module(make=lambda: 3, value=3)
    with pytest.raises(ValueError, match=r"optimizer.name='mine:make' returned a int. It has to return an optax.Grad"):
        make_optimizer(OptimizerConfig(name="mine:make"), 10, {})
    with pytest.raises(ValueError, match=r"optimizer.name='mine:value' is a int, not a function"):
        make_optimizer(OptimizerConfig(name="mine:value"), 10, {})
    with pytest.raises(ValueError, match=r"b3 is not an option. The options of adabelief are learning_rate, b1"):
        make_optimizer(OptimizerConfig(name="optax:adabelief", options={"b3": 1}), 10, {})
