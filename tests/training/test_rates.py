import numpy as np
import pytest
from spmdkit.training.optimizers import OptimizerConfig
from spmdkit.training.rates import WINDOW, LearningRates
from spmdkit.training.schedules import make_schedule

STEPS = WINDOW + 1000
COSINE = OptimizerConfig(learning_rate=0.1, schedule={"name": "warmup_cosine", "warmup_steps": 100})


def test_rates_are_those_of_all_steps_at_once():
    schedule = make_schedule(COSINE, STEPS)
    rates, together = LearningRates(schedule, STEPS), np.asarray(schedule(np.arange(STEPS)))
    for step in (0, 1, 99, 100, WINDOW - 1, WINDOW, STEPS - 1, 5):  # back again as well
        assert rates[step] == pytest.approx(together[step], rel=1e-6, abs=1e-12)
    assert len(rates) == STEPS


def test_a_short_run_is_one_window_with_the_very_same_numbers():
    schedule = make_schedule(COSINE, 500)
    assert [LearningRates(schedule, 500)[step] for step in range(500)] == np.asarray(schedule(np.arange(500))).tolist()


@pytest.mark.parametrize("name", ["constant", "cosine", "warmup_cosine", "linear", "wsd"])
def test_two_billion_steps(name):
    """As an array they would be 16 GiB, made before the first step."""
    steps = 2**31 - 1
    rates = LearningRates(make_schedule(OptimizerConfig(learning_rate=0.1, schedule={"name": name}), steps), steps)
    assert all(0 <= rates[step] <= 0.1 * (1 + 1e-7) for step in (0, steps // 2, steps - 1))


@pytest.mark.parametrize("step", [-1, 12])
def test_steps_that_there_are_not(step):
    with pytest.raises(IndexError, match="of 12"):
        LearningRates(make_schedule(COSINE.__class__(), 12), 12)[step]


@pytest.mark.parametrize("step", [0, 7, WINDOW - 1, WINDOW, 5 * WINDOW + 3])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e39])
def test_the_first_rate_that_is_no_number_of_float32(step, wrong):
    rates = LearningRates(lambda steps: np.where(steps >= step, wrong, 0.1), 6 * WINDOW)
    assert rates.first_not_finite() == step


def test_rates_that_are_numbers():
    assert LearningRates(make_schedule(COSINE, STEPS), STEPS).first_not_finite() is None
    assert (
        LearningRates(lambda steps: np.where(steps == 2**31 - 2, np.nan, 0.1), 2**31 - 1).first_not_finite()
        == 2**31 - 2
    )
