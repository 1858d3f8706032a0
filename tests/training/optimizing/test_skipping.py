"""Updates with gradients that are not finite are left out, counted, and made after so many in a row."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.parallel import Model, build_step, lay_out
from spmdkit.training.optimizing.optimizers import OptimizerConfig, make_optimizer
from spmdkit.training.optimizing.skipping import skip_not_finite, skipped
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
