"""A rate that falls where the loss no longer does: as the loss alone says, on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from spmdkit.parallel import build_step, lay_out
from spmdkit.training.optimizing.groups import GroupConfig
from spmdkit.training.optimizing.learning_rates import make_learning_rate
from spmdkit.training.optimizing.optimizers import OptimizerConfig, make_optimizer
from spmdkit.training.optimizing.plateau import main_plateau_scale, plateau_scales, scale_on_plateau

PARAMS = {"w": jnp.ones(2), "b": jnp.ones(2)}


def scales(losses, **options):
    """The rate of each step, as a part of the highest, for these losses."""
    config = OptimizerConfig(name="sgd", learning_rate=1.0, schedule={"name": "plateau", **options})
    optimizer = make_optimizer(config, len(losses), PARAMS)
    state, found = optimizer.init(PARAMS), []
    for loss in losses:
        updates, state = optimizer.update(PARAMS, state, PARAMS, value=jnp.float32(loss))
        found.append(-float(updates["w"][0]))
        assert "warmup_steps" in options or float(plateau_scales(state)[0]) == found[-1]
    return found


CASES = {
    # losses, options, rates
    "falls": ([4, 3, 2, 1], {"patience": 1, "window_steps": 1}, [1, 1, 1, 1]),
    "stands": ([4, 4, 4, 4], {"patience": 2, "window_steps": 1}, [1, 1, 0.5, 0.5]),
    "factor": ([4, 4, 4], {"patience": 1, "window_steps": 1, "factor": 0.1}, [1, 0.1, 0.01]),
    "tolerance": ([4, 3.9, 3.8], {"patience": 1, "window_steps": 1, "tolerance": 0.1}, [1, 0.5, 0.25]),
    "cooldown": ([4, 4, 4, 4], {"patience": 1, "window_steps": 1, "cooldown": 1}, [1, 0.5, 0.5, 0.25]),
    "at least": ([4, 4, 4, 4], {"patience": 1, "window_steps": 1, "final_ratio": 0.4}, [1, 0.5, 0.4, 0.4]),
    "means": ([4, 2, 3, 3, 3, 3], {"patience": 1, "window_steps": 2}, [1, 1, 1, 0.5, 0.5, 0.25]),
    "after a warm-up": ([4, 3, 2], {"warmup_steps": 1}, [0.5, 1, 1]),
}


@pytest.mark.parametrize("name", CASES)
def test_rates(name):
    losses, options, expected = CASES[name]
    np.testing.assert_allclose(scales(losses, **options), expected, rtol=1e-6)


def test_a_group_that_follows_the_loss_alone():
    plateau = {"name": "plateau", "patience": 1, "window_steps": 1}
    config = OptimizerConfig(name="sgd", learning_rate=1.0, groups={"w": GroupConfig(schedule=plateau)})
    optimizer = make_optimizer(config, 10, PARAMS)
    state = optimizer.init(PARAMS)
    for _ in range(2):
        updates, state = optimizer.update(PARAMS, state, PARAMS, value=jnp.float32(1.0))
    assert (float(updates["w"][0]), float(updates["b"][0])) == (-0.5, -1.0)
    assert plateau_scales(make_optimizer(OptimizerConfig(), 10, PARAMS).init(PARAMS)) == []


def test_in_a_step_on_a_mesh():
    """Losses that never fall by half: after two steps the rate is half of it, everywhere."""
    schedule = {"name": "plateau", "patience": 1, "window_steps": 1, "tolerance": 0.5}
    config = OptimizerConfig(name="sgd", learning_rate=1e-3, schedule=schedule)
    model = toy.BLOCK_MODEL
    optimizer = make_optimizer(config, 10, jax.eval_shape(toy.init, jax.random.key(0)))
    step = build_step(model, optimizer, lay_out(model, {"fsdp": {"size": 8, "floor_bytes": 0}}))
    state = step.init(0)
    for expected in (1.0, 0.5, 0.25):
        state, _ = step(state, toy.batch(0))
        (scale,) = plateau_scales(state.opt_state)
        assert float(scale) == expected
        assert scale.sharding.is_fully_replicated


@pytest.mark.parametrize("name", ["patience", "window_steps", "cooldown"])
def test_counts_beyond_32_bits_never_end(name):
    optimizer = scale_on_plateau({"name": "plateau", name: 10**25})
    params = {"w": jnp.ones(2)}
    update = jax.jit(lambda state: optimizer.update(params, state, params, value=jnp.float32(1)))
    assert float(plateau_scales(update(optimizer.init(params))[1])[0]) == 1.0


def test_the_rate_on_the_host_is_the_highest():
    """What it is scaled by is not known there."""
    np.testing.assert_array_equal(make_learning_rate(0.5, {"name": "plateau"}, 10)(np.arange(10)), 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor": 1.0}, "optimizer.schedule.factor=1.0 has to be between 0 and 1"),
        ({"factor": 1e-320}, "optimizer.schedule.factor=1e-320 has to be between 0 and 1, in float32"),
        ({"factor": float("nan")}, "optimizer.schedule.factor=nan has to be between 0 and 1"),
        ({"tolerance": 0}, "optimizer.schedule.tolerance=0 has to be between 0 and 1"),
        ({"patience": 0}, "optimizer.schedule.patience=0 has to be a number of windows, at least 1"),
        ({"cooldown": -1}, "optimizer.schedule.cooldown=-1 has to be a number of windows, at least 0"),
        ({"window_steps": 0}, "optimizer.schedule.window_steps=0: the loss is a mean over at least 1 step"),
        ({"decay_steps": 3}, "optimizer.schedule.decay_steps is not an option of plateau"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(schedule={"name": "plateau", **options})


def test_the_main_scale_is_that_of_no_group():
    """Whatever the label of the group, before or after `rest` in the state."""
    never = {"name": "plateau", "patience": 50, "window_steps": 1}
    soon = {"name": "plateau", "patience": 1, "window_steps": 1}
    config = OptimizerConfig(name="sgd", schedule=never, groups={"w": GroupConfig(schedule=soon)})
    optimizer = make_optimizer(config, 10, PARAMS)
    state = optimizer.init(PARAMS)
    for _ in range(3):
        _, state = optimizer.update(PARAMS, state, PARAMS, value=jnp.float32(1.0))
    assert sorted(map(float, plateau_scales(state))) == [0.25, 1.0]
    assert float(main_plateau_scale(state)) == 1.0
    assert main_plateau_scale(make_optimizer(OptimizerConfig(), 10, PARAMS).init(PARAMS)) is None
