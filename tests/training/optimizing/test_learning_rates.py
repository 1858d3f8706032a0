import jax
import numpy as np
import pytest
from spmdkit.training.optimizing.learning_rates import SCHEDULES, WINDOW, LearningRates, make_learning_rate
from spmdkit.training.optimizing.optimizer_config import OptimizerConfig

STEPS = WINDOW + 1000
COSINE = {"name": "warmup_cosine", "warmup_steps": 100}

# Options, number of steps, and the rate, as a part of the peak, at some steps.
VALUES = {
    "constant": ({"name": "constant"}, 100, {0: 1, 99: 1}),
    "no name": ({}, 100, {0: 1, 99: 1}),
    "cosine": ({"name": "cosine"}, 100, {0: 1, 50: 0.5, 25: 0.5 + 0.5**1.5, 100: 0}),
    "cosine to a tenth": ({"name": "cosine", "final_ratio": 0.1}, 100, {0: 1, 50: 0.55, 100: 0.1}),
    "warm-up": ({"name": "warmup_cosine", "warmup_steps": 9}, 109, {0: 0.1, 4: 0.5, 9: 1, 59: 0.5, 109: 0}),
    "hyphen": ({"name": "warmup-cosine", "warmup_steps": 9}, 109, {0: 0.1, 9: 1}),
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
def test_values(name):
    options, num_steps, expected = VALUES[name]
    schedule = schedule_of(options, num_steps)
    rates = [float(schedule(step)) / 3e-4 for step in expected]
    np.testing.assert_allclose(rates, list(expected.values()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_step_of_a_run_has_a_rate(name):
    """As an array on the host, and under jit."""
    schedule = schedule_of({"name": name}, 40)
    steps = np.arange(40)
    rates = np.broadcast_to(schedule(steps), steps.shape)
    assert (rates > 0).all()
    assert rates.max() <= 3e-4 * (1 + 1e-6)
    np.testing.assert_allclose([jax.jit(schedule)(step) for step in (0, 17, 39)], rates[[0, 17, 39]], rtol=1e-4)


@pytest.mark.parametrize("name", SCHEDULES)
def test_runs_of_one_step(name):
    assert float(schedule_of({"name": name}, 1)(0)) == pytest.approx(3e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "cosin"}, "optimizer.schedule.name='cosin' is not a schedule. Did you mean cosine"),
        ({"name": 3}, "optimizer.schedule.name=3 is not a schedule. Choose from constant, cosine"),
        ({"name": "cosine", "warmup_steps": 3}, r"optimizer.schedule.warmup_steps is not an option of cosine"),
        (
            {"name": "wsd", "decay_step": 3},
            "decay_step is not an option of wsd. Did you mean decay_steps",
        ),
        ({"name": "wsd", "decay_steps": -1}, "optimizer.schedule.decay_steps=-1 has to be a number of steps"),
        ({"name": "wsd", "warmup_steps": 2.5}, "optimizer.schedule.warmup_steps=2.5 has to be a number of steps"),
        ({"name": "linear", "final_ratio": 1.5}, "optimizer.schedule.final_ratio=1.5 has to be a part"),
    ],
)
def test_problems_of_any_run(options, message):
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
def test_parts_longer_than_the_run(options, message):
    with pytest.raises(ValueError, match=message):
        schedule_of(options, 50)


def test_rates_are_those_of_all_steps_at_once():
    schedule = make_learning_rate(0.1, COSINE, STEPS)
    rates, together = LearningRates(schedule, STEPS), np.asarray(schedule(np.arange(STEPS)))
    for step in (0, 1, 99, 100, WINDOW - 1, WINDOW, STEPS - 1, 5):  # back again as well
        assert rates[step] == pytest.approx(together[step], rel=1e-6, abs=1e-12)
    assert len(rates) == STEPS


def test_a_short_run_is_one_window_with_the_very_same_numbers():
    schedule = make_learning_rate(0.1, COSINE, 500)
    assert [LearningRates(schedule, 500)[step] for step in range(500)] == np.asarray(schedule(np.arange(500))).tolist()


@pytest.mark.parametrize("name", ["constant", "cosine", "warmup_cosine", "linear", "wsd"])
def test_two_billion_steps(name):
    """As an array they would be 16 GiB, made before the first step."""
    steps = 2**31 - 1
    rates = LearningRates(make_learning_rate(0.1, {"name": name}, steps), steps)
    assert all(0 <= rates[step] <= 0.1 * (1 + 1e-7) for step in (0, steps // 2, steps - 1))


@pytest.mark.parametrize("step", [-1, 12])
def test_steps_that_there_are_not(step):
    with pytest.raises(IndexError, match="of 12"):
        LearningRates(make_learning_rate(0.1, {}, 12), 12)[step]


@pytest.mark.parametrize("step", [0, 7, WINDOW - 1, WINDOW, 5 * WINDOW + 3])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e39])
def test_the_first_rate_that_is_no_number_of_float32(step, wrong):
    rates = LearningRates(lambda steps: np.where(steps >= step, wrong, 0.1), 6 * WINDOW)
    assert rates.first_not_finite() == step


def test_rates_that_are_numbers():
    assert LearningRates(make_learning_rate(0.1, COSINE, STEPS), STEPS).first_not_finite() is None
    assert (
        LearningRates(lambda steps: np.where(steps == 2**31 - 2, np.nan, 0.1), 2**31 - 1).first_not_finite()
        == 2**31 - 2
    )
