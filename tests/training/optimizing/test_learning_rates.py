import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.parallel import build_step, lay_out
from spmdkit.training.optimizing.groups import GroupConfig
from spmdkit.training.optimizing.learning_rates import SCHEDULES, WINDOW, make_learning_rate, plateau_scale, rate_reader
from spmdkit.training.optimizing.optimizer_config import OptimizerConfig
from spmdkit.training.optimizing.optimizers import make_optimizer
from support import toy

STEPS = WINDOW + 1000
COSINE = {"name": "warmup_cosine", "warmup_steps": 100}

# Options, number of steps, and the rate, as a part of the peak, at some steps.
VALUES = {
    "constant": ({"name": "constant"}, 100, {0: 1, 99: 1}),
    "no name": ({}, 100, {0: 1, 99: 1}),
    "cosine": ({"name": "cosine"}, 100, {0: 1, 50: 0.5, 25: 0.5 + 0.5**1.5, 100: 0}),
    "cosine to a tenth": ({"name": "cosine", "final_ratio": 0.1}, 100, {0: 1, 50: 0.55, 100: 0.1}),
    "warm-up": ({"name": "warmup_cosine", "warmup_steps": 9}, 109, {0: 0.1, 4: 0.5, 9: 1, 59: 0.5, 109: 0}),
    "default warm-up": ({"name": "warmup_cosine"}, 100, {0: 1 / 6, 5: 1}),
    "no warm-up": ({"name": "warmup_cosine", "warmup_steps": 0}, 100, {0: 1, 50: 0.5}),
    "linear": ({"name": "linear"}, 100, {0: 1, 25: 0.75, 99: 0.01}),
    "linear with warm-up": ({"name": "linear", "warmup_steps": 1, "final_ratio": 0.5}, 101, {0: 0.5, 1: 1, 51: 0.75}),
    "wsd": ({"name": "wsd", "warmup_steps": 4, "decay_steps": 10}, 50, {0: 0.2, 4: 1, 40: 1, 45: 0.5, 49: 0.1}),
    "wsd by default": ({"name": "wsd"}, 100, {0: 1 / 6, 5: 1, 79: 1, 80: 1, 90: 0.5}),
    "wsd without decay": ({"name": "wsd", "decay_steps": 0}, 100, {99: 1}),
    "wsd all decay": ({"name": "wsd", "warmup_steps": 0, "decay_steps": 100}, 100, {0: 1, 50: 0.5}),
}


def schedule_of(options, num_steps, peak=3e-4):
    return make_learning_rate(peak, options, num_steps)


@pytest.mark.parametrize("name", VALUES)
def test_computes_rates(name):
    options, num_steps, expected = VALUES[name]
    schedule = schedule_of(options, num_steps)
    rates = [float(schedule(step)) / 3e-4 for step in expected]
    np.testing.assert_allclose(rates, list(expected.values()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_gives_every_step_a_rate(name):
    """As an array on the host, and under jit."""
    schedule = schedule_of({"name": name}, 40)
    steps = np.arange(40)
    rates = np.broadcast_to(schedule(steps), steps.shape)
    assert (rates > 0).all()
    assert rates.max() <= 3e-4 * (1 + 1e-6)
    np.testing.assert_allclose([jax.jit(schedule)(step) for step in (0, 17, 39)], rates[[0, 17, 39]], rtol=1e-4)


@pytest.mark.parametrize("name", SCHEDULES)
def test_supports_runs_of_one_step(name):
    assert float(schedule_of({"name": name}, 1)(0)) == pytest.approx(3e-4)


PLATEAU_OPTIONS = [
    ({"factor": 1.0}, "optimizer.schedule.factor=1.0 must be less than 1"),
    ({"factor": 1e-320}, "optimizer.schedule.factor=1e-320 must be positive in float32"),
    ({"factor": float("nan")}, "optimizer.schedule.factor=nan must be a finite number"),
    ({"tolerance": 0}, "optimizer.schedule.tolerance=0 must be positive in float32"),
    ({"patience": 0}, "optimizer.schedule.patience=0 must be at least 1"),
    ({"patience": 10**25}, f"optimizer.schedule.patience={10**25} must be less than 2147483648"),
    ({"cooldown": -1}, "optimizer.schedule.cooldown=-1 must be at least 0"),
    ({"window_steps": 0}, "optimizer.schedule.window_steps=0 must be at least 1"),
    ({"decay_steps": 3}, "optimizer.schedule.decay_steps is not an option of plateau"),
]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"name": "plateau", **options}, message) for options, message in PLATEAU_OPTIONS),
        ({"name": "cosin"}, "optimizer.schedule.name='cosin' is not a schedule. Did you mean cosine"),
        ({"name": 3}, "optimizer.schedule.name=3 is not a schedule. Choose from constant, cosine"),
        ({"name": "cosine", "warmup_steps": 3}, r"optimizer.schedule.warmup_steps is not an option of cosine"),
        ({"name": "wsd", "decay_step": 3}, "decay_step is not an option of wsd. Did you mean decay_steps"),
        ({"name": "wsd", "decay_steps": -1}, "optimizer.schedule.decay_steps=-1 must be at least 0"),
        ({"name": "wsd", "warmup_steps": 2.5}, "optimizer.schedule.warmup_steps=2.5 must be an integer"),
        ({"name": "linear", "final_ratio": 1.5}, "optimizer.schedule.final_ratio=1.5 must be at most 1"),
    ],
)
def test_rejects_invalid_schedules(options, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(schedule=options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "warmup_cosine", "warmup_steps": 50}, "optimizer.schedule.warmup_steps=50, but .* train.steps=50"),
        (
            {"name": "wsd", "warmup_steps": 30, "decay_steps": 30},
            r"warmup_steps=30 \+ optimizer.schedule.decay_steps=30 = 60 steps, but the run has train.steps=50",
        ),
    ],
)
def test_rejects_schedules_longer_than_the_run(options, message):
    with pytest.raises(ValueError, match=message):
        schedule_of(options, 50)


@pytest.mark.slow
def test_windows_give_the_same_rates():
    schedule = make_learning_rate(0.1, COSINE, STEPS)
    rate_of, together = rate_reader(schedule, STEPS), np.asarray(schedule(np.arange(STEPS)))
    for step in (0, 1, 99, 100, WINDOW - 1, WINDOW, STEPS - 1, 5):  # back again as well
        assert rate_of(step) == pytest.approx(together[step], rel=1e-6, abs=1e-12)


PARAMS = {"w": jnp.ones(2), "b": jnp.ones(2)}


def scales(losses, **options):
    """The rate of each step, as a part of the highest, for these losses."""
    config = OptimizerConfig(name="sgd", learning_rate=1.0, schedule={"name": "plateau", **options})
    optimizer = make_optimizer(config, len(losses), PARAMS)
    state, found = optimizer.init(PARAMS), []
    for loss in losses:
        updates, state = optimizer.update(PARAMS, state, PARAMS, value=jnp.float32(loss))
        found.append(-float(updates["w"][0]))
        assert "warmup_steps" in options or float(plateau_scale(state)) == found[-1]
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
def test_plateau_scales_by_the_loss(name):
    losses, options, expected = CASES[name]
    np.testing.assert_allclose(scales(losses, **options), expected, rtol=1e-6)


def test_plateau_works_in_a_step_on_a_mesh():
    """Losses that never fall by half: after two steps the rate is half of it, everywhere."""
    schedule = {"name": "plateau", "patience": 1, "window_steps": 1, "tolerance": 0.5}
    config = OptimizerConfig(name="sgd", learning_rate=1e-3, schedule=schedule)
    model = toy.BLOCK_MODEL
    optimizer = make_optimizer(config, 10, jax.eval_shape(toy.init, jax.random.key(0)))
    step = build_step(model, optimizer, lay_out(model, {"fsdp": {"size": 8, "floor_bytes": 0}}))
    state = step.init(0)
    for expected in (1.0, 0.5, 0.25):
        state, _ = step(state, toy.batch(0))
        scale = plateau_scale(state.opt_state)
        assert float(scale) == expected
        assert scale.sharding.is_fully_replicated


def test_host_rate_of_plateau_is_the_peak():
    """What it is scaled by is not known there."""
    np.testing.assert_array_equal(make_learning_rate(0.5, {"name": "plateau"}, 10)(np.arange(10)), 0.5)


def test_main_scale_is_that_of_ungrouped_parameters():
    """Whatever the label of the group, before or after `rest` in the state."""
    never = {"name": "plateau", "patience": 50, "window_steps": 1}
    soon = {"name": "plateau", "patience": 1, "window_steps": 1}
    config = OptimizerConfig(name="sgd", schedule=never, groups={"w": GroupConfig(schedule=soon)})
    optimizer = make_optimizer(config, 10, PARAMS)
    state = optimizer.init(PARAMS)
    for _ in range(3):
        _, state = optimizer.update(PARAMS, state, PARAMS, value=jnp.float32(1.0))
    assert float(plateau_scale(state)) == 1.0
    assert plateau_scale(make_optimizer(OptimizerConfig(), 10, PARAMS).init(PARAMS)) is None
