"""Updates with gradients that are not finite are left out, counted, and made after so many in a row."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.layouts.paths import leaves_with_paths
from spmdkit.parallel import LossSums, Model, Precision, build_step, lay_out
from spmdkit.parallel.step.skipping import Skipping, skip_not_finite, skipped
from spmdkit.training.optimizing.averaging import EMAConfig
from spmdkit.training.optimizing.optimizers import OptimizerConfig, make_optimizer
from spmdkit.training.steps.not_finite import Diverged, check_finite
from support import toy
from support.training import updated

PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}


def gradients(bad=None):
    good = jax.tree.map(lambda leaf: 0.1 * leaf, PARAMS)
    return good if bad is None else {**good, "w": good["w"].at[1, 2].set(bad)}


def run(optimizer, given):
    """The parameters and the number of updates left out after each step."""
    return [(params, int(skipped(state))) for state, params in updated(optimizer, PARAMS, given)]


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_skipped_step_changes_nothing(bad):
    """Moments and counts of the optimizer stay as well: what follows is bit for bit what it would be."""
    inner = optax.adamw(0.1, weight_decay=0.5)
    with_bad = run(skip_not_finite(inner, 2), [gradients(), gradients(bad), gradients(bad), gradients()])
    without = run(skip_not_finite(inner, 2), [gradients(), gradients()])
    assert [count for _, count in with_bad] == [0, 1, 2, 2]
    jax.tree.map(np.testing.assert_array_equal, with_bad[2][0], with_bad[0][0])
    jax.tree.map(np.testing.assert_array_equal, with_bad[3][0], without[1][0])


def test_applies_the_update_after_the_maximum_of_skips():
    """So that the run notices: its parameters are no longer finite."""
    nan = gradients(float("nan"))
    found = run(skip_not_finite(optax.sgd(0.1), 1), [nan, gradients(), nan, nan])
    finite = [bool(jnp.isfinite(params["w"]).all()) for params, _ in found]
    assert finite == [True, True, True, False]
    assert [count for _, count in found] == [1, 1, 2, 3]


def test_max_skips_enables_skipping():
    optimizer = make_optimizer(OptimizerConfig(name="sgd"), 10, PARAMS, max_skips=3)
    assert run(optimizer, [gradients(float("nan"))])[0][1] == 1
    assert skipped(make_optimizer(OptimizerConfig(name="sgd"), 10, PARAMS).init(PARAMS)) is None


def test_all_devices_skip_together():
    """A gradient that is not finite in one shard of one parameter alone leaves the update out on all."""

    def loss(params, batch, key):
        bad = jnp.where(batch["inputs"].sum() > 1e6, jnp.nan, 1.0)
        weight = batch["weights"].sum()
        return (params["w"][0] * bad + params["w"][1:].sum() + params["b"].sum()) * weight, weight

    model = Model(init=lambda key: {"w": jnp.ones(16), "b": jnp.ones(3)}, loss=loss)
    optimizer = make_optimizer(OptimizerConfig(name="sgd", learning_rate=1.0), 10, PARAMS, max_skips=1)
    layouts = lay_out(model, {"fsdp": {"size": 8, "floor_bytes": 0}}, indivisible="replicate")
    step = build_step(model, optimizer, layouts)
    state = step.init(0)
    for inputs, left_out, w in ((0, 0, 0.0), (10**7, 1, 0.0), (0, 1, -1.0)):
        batch = {name: np.full(8, value, np.float32) for name, value in (("inputs", inputs), ("weights", 1))}
        state, _ = step(state, batch)
        assert int(skipped(state.opt_state)) == left_out
        np.testing.assert_array_equal(state.params["w"], w)
        np.testing.assert_array_equal(state.params["b"], w)


# A skipped step leaves every state as it was

ROWS, WIDTH = 16, 4
ADAM = {"name": "adamw", "learning_rate": 0.1, "weight_decay": 0.1}
PLATEAU = {"name": "plateau", "patience": 1, "factor": 0.5, "warmup_steps": 0}
COMPRESSED = {"data": {"size": 4, "compress": "int8"}}
OPTIMIZERS = {
    "averages": {**ADAM, "ema": EMAConfig(decay=0.9)},
    "plateau": {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9, "schedule": PLATEAU},
    "muon": {"name": "muon", "learning_rate": 0.1},
    "adafactor": {"name": "adafactor", "learning_rate": 0.1},
    "lion": {"name": "lion", "learning_rate": 0.1},
}
STRATEGIES = {
    "data": {"data": 4},
    "compressed": COMPRESSED,
    "compressed shards": {**COMPRESSED, "fsdp": {"size": 2, "floor_bytes": 1}},
    "zero": {"data": {"size": 4, "zero": 2, "floor_bytes": 1}},
    "local steps": {"data": {"size": 4, "local_steps": 3}},
}


def small_loss(params, batch, key, state=()):
    found = batch["inputs"] @ params["w"] + params["b"][None]
    weights = batch["weights"]
    total = ((found - 1) ** 2).sum(axis=1) @ weights + batch["offset"].sum()
    if state:
        mean = 0.9 * state["mean"] + 0.1 * batch["inputs"].mean(axis=0)
        state = {"mean": mean, "batches": state["batches"] + 1}
    return LossSums(total, weights.sum(), {}, state)


def small_params(key):
    return {"w": jnp.linspace(-1.0, 1.0, WIDTH * WIDTH).reshape(WIDTH, WIDTH), "b": jnp.zeros(WIDTH)}


def small_state(key):
    return {"mean": jnp.zeros(WIDTH), "batches": jnp.int32(0)}


SMALL = Model(init=small_params, loss=small_loss, name="small")
WITH_STATE = replace(SMALL, init_state=small_state)
BAD = {
    "gradients": {"inputs": np.nan},
    "norm": {"inputs": 1e15},  # gradients are finite, and their squares are not
    "loss": {"offset": np.nan},
}
"""Kind -> the values of one row on one device."""


def small_batch(seed, kind=None):
    inputs = np.random.default_rng(seed).normal(size=(ROWS, WIDTH)).astype(np.float32)
    batch = {"inputs": inputs, "offset": np.zeros(ROWS, np.float32), "weights": np.ones(ROWS, np.float32)}
    for name, value in BAD.get(kind, {}).items():
        batch[name][5] = value
    return batch


def skipping_step(strategy, optimizer, model=SMALL, *, max_skips=2, **options):
    config = OptimizerConfig(**OPTIMIZERS[optimizer])
    params = jax.eval_shape(small_params, None)
    made = make_optimizer(config, 10, params, max_skips=max_skips)
    return toy.build(STRATEGIES[strategy], made, model, **options)


def uncounted(state):
    """The arrays of a state by path, without the numbers of steps, of skipped updates and of loss scaling."""

    def inner(node):
        return node.inner if isinstance(node, Skipping) else node

    kept = state._replace(step=(), loss_scale=())
    kept = jax.tree.map(inner, kept, is_leaf=lambda node: isinstance(node, Skipping))
    return {path: np.asarray(leaf) for path, leaf in leaves_with_paths(kept)}


def assert_same(state, expected):
    found, wanted = uncounted(state), uncounted(expected)
    assert found.keys() == wanted.keys()
    changed = [path for path in wanted if found[path].tobytes() != wanted[path].tobytes()]
    assert not changed


def check_skips(step, kind):
    """Skips a bad batch, and goes on as if it had not been there."""
    state = step.init(0)
    for seed in range(2):
        state, _ = step(state, small_batch(seed))
    before = jax.device_get(state)
    state, _ = step(state, small_batch(2, kind))
    assert int(state.step) == 3
    assert_same(jax.device_get(state), before)
    scale = jax.tree.map(jnp.copy, state.loss_scale)
    after, metrics = step(state, small_batch(3))
    assert np.isfinite(float(metrics.loss))
    assert np.isfinite(float(metrics.grad_norm))
    again = jax.device_put(before, jax.tree.map(lambda leaf: leaf.sharding, after))
    without, _ = step(again._replace(step=again.step + 1, loss_scale=scale), small_batch(3))
    assert_same(jax.device_get(after), jax.device_get(without))
    check_finite(4, after)


@pytest.mark.slow_cases("norm", "loss")
@pytest.mark.parametrize("kind", BAD)
def test_compression_recovers_from_a_batch_that_is_not_finite(kind):
    """Its errors from before are kept: a NaN there would spoil all later steps."""
    check_skips(skipping_step("compressed", "averages"), kind)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_state_of_a_strategy_stays(strategy, optimizer):
    check_skips(skipping_step(strategy, optimizer), "gradients")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["norm", "loss"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_update_is_skipped_if_the_loss_or_the_norm_alone_is_not_finite(strategy, kind):
    """Gradients are finite: the update would be applied, although the run reports it as skipped."""
    check_skips(skipping_step(strategy, "averages"), kind)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"clip_norm": 0.1}], ids=["", "accumulate", "clip"])
@pytest.mark.parametrize("strategy", ["data", "compressed", "compressed shards", "zero"])
def test_the_state_of_a_model_stays(strategy, options):
    step = skipping_step(strategy, "averages", WITH_STATE, **options)
    for kind in BAD:
        check_skips(step, kind)


@pytest.mark.slow
@pytest.mark.parametrize("max_skips", [0, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dynamic_loss_scaling_halves_the_scale_and_leaves_the_rest(strategy, max_skips):
    model = SMALL if strategy == "local steps" else WITH_STATE
    precision = Precision(loss_scale="dynamic")
    step = skipping_step(strategy, "plateau", model, max_skips=max_skips, precision=precision)
    for kind in ("gradients", "loss"):
        check_skips(step, kind)
    state, _ = step(step.init(0), small_batch(2, "gradients"))
    assert float(state.loss_scale.scale) == precision.loss_scale_initial / 2


@pytest.mark.parametrize("bad_step", [2, 3])
def test_all_groups_of_local_steps_skip_together(bad_step):
    """The batch of one group alone is not finite. If it would end a round of 3 steps, the next round ends both."""
    step = skipping_step("local steps", "averages")
    state = step.init(0)
    meetings = []
    for number in range(1, 7):
        before = jax.device_get(state)
        kind = "gradients" if number == bad_step else None
        state, metrics = step(state, small_batch(number, kind))
        after = jax.device_get(state)
        if number == bad_step:
            assert not np.isfinite(float(metrics.loss))
            assert_same(after, before)
        if not np.array_equal(after.params["w"], before.params["w"]):
            meetings.append(number)
            copies = after.extra.copies["w"]
            np.testing.assert_array_equal(copies, np.broadcast_to(copies[:1], copies.shape))
    assert meetings == ([3, 6] if bad_step == 2 else [6])


def test_compression_applies_the_update_after_the_maximum_of_skips():
    """The run then ends as diverged."""
    step = skipping_step("compressed", "averages", max_skips=1)
    state = step.init(0)
    for seed in range(2):
        state, _ = step(state, small_batch(seed, "gradients"))
    with pytest.raises(Diverged, match="the parameters are not finite"):
        check_finite(2, state)
