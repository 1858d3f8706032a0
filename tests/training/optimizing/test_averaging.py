"""The average of the parameters equals one computed in NumPy, wherever they lie, and follows accepted updates alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.models.frozen import freeze
from spmdkit.parallel import Precision, census
from spmdkit.training.optimizing.averaging import EMAConfig, average_reader, averaged
from spmdkit.training.optimizing.optimizers import OptimizerConfig, make_optimizer
from support import toy
from support.rows import batches, model, row_named
from support.training import updated

STRATEGIES = {
    "data-fsdp": {"data": 2, "fsdp": {"size": 2, "floor_bytes": 0}},
    "zero1": {"data": {"size": 4, "zero": 1}},
    "zero2-fsdp": {"data": {"size": 2, "zero": 2}, "fsdp": {"size": 2, "floor_bytes": 0}},
}


def in_numpy(average, params, number, decay):
    """The rule, written again."""
    weight = max(1 - decay, 9 / (9 + number))
    return jax.tree.map(lambda old, new: (1 - weight) * old + weight * new, average, params)


def check(own, strategy, given, decay=0.8):
    step = toy.build(strategy, averaged(optax.adamw(0.05), decay), own, precision=toy.FLOAT64)
    layouts, read, state = step.plan, average_reader(step.plan), step.init(0)
    expected = jax.device_get(state.params)
    for number, batch in enumerate(given, 1):
        state, _ = step(state, batch)
        expected = in_numpy(expected, jax.device_get(state.params), number, decay)
    found = read(state)
    assert max(jax.tree.leaves(jax.tree.map(toy.relative, found, expected))) < 1e-12
    assert max(jax.tree.leaves(jax.tree.map(toy.relative, state.params, expected))) > 1e-3
    assert int(state.opt_state.updates) == len(given)
    where = jax.tree.map(lambda leaf: leaf.sharding, state.opt_state.average)
    assert jax.tree.all(jax.tree.map(lambda a, b: a == b, where, layouts.update_table.shardings()))
    abstract = toy.abstract(given[0])
    assert census(step.compile(abstract).as_text(), layouts.mesh) == step.cost(abstract)
    return step, abstract


@pytest.mark.slow_cases("data-fsdp")
@pytest.mark.parametrize(
    "name", ["data-fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero1", "zero2-fsdp"))]
)
def test_average_equals_numpy(name, float64):
    check(toy.BLOCK_MODEL, STRATEGIES[name], [toy.batch(seed) for seed in range(3)])


@pytest.mark.long_cases("moe-data2-expert2-context2", "transformer-pipe2-fsdp2-tensor2", "zbv-4")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer-pipe2-fsdp2-tensor2", "zbv-4", "moe-data2-expert2-context2"])
def test_average_of_a_split_model_equals_numpy(name, float64):
    row = row_named(name)
    check(model(row.kind, row.layers), row.strategy, batches(False)[:2])


PARAMS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float32)}


def run(optimizer, given):
    """The state after updates with these gradients, and the parameters after each."""
    states, found = zip(*updated(optimizer, PARAMS, given), strict=True)
    return states[-1], found


def test_weight_falls_to_one_minus_decay():
    """From 9 / 10 on, until it is 1 - decay: after 9 decay / (1 - decay) = 36 updates."""
    state, found = run(averaged(optax.sgd(0.01), 0.8), [PARAMS] * 50)
    expected = PARAMS
    for number, params in enumerate(found, 1):
        weight = 9 / (9 + number) if number < 36 else 0.2
        expected = jax.tree.map(lambda old, new, weight=weight: old + weight * (new - old), expected, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6), state.average, expected)


def test_skipped_updates_do_not_count():
    nan = jax.tree.map(lambda leaf: leaf * np.nan, PARAMS)
    config = OptimizerConfig(name="sgd", ema=EMAConfig(decay=0.9))
    state, _ = run(make_optimizer(config, 10, PARAMS, max_skips=2), [PARAMS, nan, nan, PARAMS])
    without, _ = run(make_optimizer(config, 10, PARAMS, max_skips=2), [PARAMS, PARAMS])
    assert int(state.updates) == 2
    jax.tree.map(np.testing.assert_array_equal, state.average, without.average)


@pytest.mark.slow
def test_updates_skipped_by_loss_scaling_do_not_count():
    optimizer, precision = averaged(toy.SGD, 0.9), Precision(loss_scale="dynamic")
    step = toy.build({"data": 2}, optimizer, toy.PLAIN_MODEL, precision=precision)
    state, _ = step(step.init(0), toy.batch(0))
    before = jax.device_get(state.opt_state)
    bad = toy.batch(1)
    bad["weights"][0, 0] = np.inf
    state, _ = step(state, bad)
    assert float(state.loss_scale.scale) == 2.0**14
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.opt_state), before)


def test_frozen_parameters_are_their_own_average():
    own = freeze(toy.BLOCK_MODEL, ("embed/.*",))
    config = OptimizerConfig(name="sgd", learning_rate=0.5, freeze=("embed/.*",), ema=EMAConfig(decay=0.9))
    shapes = jax.eval_shape(own.init, jax.random.key(0))
    step = toy.build({"data": 2}, make_optimizer(config, 10, shapes), own)
    state, _ = step(step.init(0), toy.batch(0))
    assert not jax.tree.leaves(state.opt_state.average["embed"])
    found = average_reader(step.plan)(state)
    np.testing.assert_array_equal(found["embed"]["table"], state.params["embed"]["table"])
    assert (np.asarray(found["head"]["out"]) != np.asarray(state.params["head"]["out"])).any()


def test_average_of_bfloat16_is_float32():
    """bfloat16 would lose what a thousandth adds."""
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    optimizer = averaged(optax.sgd(1.0), 0.5)
    state = optimizer.init(params)
    _, state = optimizer.update({"w": jnp.full(3, 0.5, jnp.bfloat16)}, state, params)
    assert state.average["w"].dtype == jnp.float32
    np.testing.assert_allclose(state.average["w"], 1 - 0.9 * 0.5, rtol=1e-6)


def test_update_wrappers_go_inside_the_average():
    halved = optax.chain(optax.sgd(1.0), optax.scale(0.5))
    config = OptimizerConfig(name="sgd", learning_rate=1.0, ema=EMAConfig(decay=0.9))
    around = make_optimizer(config, 10, PARAMS, around=lambda inner: optax.chain(inner, optax.scale(0.5)))
    state, _ = run(around, [PARAMS])
    jax.tree.map(np.testing.assert_array_equal, state.average, run(averaged(halved, 0.9), [PARAMS])[0].average)
