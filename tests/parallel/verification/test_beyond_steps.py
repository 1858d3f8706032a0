"""Evaluation: doubled, weighed otherwise, with the random numbers of training."""

import jax
import pytest
from planted import DROPOUT, found, one_device_is_compiled_once, verified  # noqa: F401  (a fixture of every test here)
from spmdkit.parallel import Model
from spmdkit.parallel.step import composition
from spmdkit.parallel.step import train_step as step_file


def doubled(total, weight):
    return 2 * total, 2 * weight


def heavier(total, weight):
    return total, weight + 1


@pytest.mark.parametrize(
    ("plant", "texts"),
    [
        (doubled, ("sum of the losses is", "2 times as large", "The weight is")),
        (heavier, ("The weight is",)),
    ],
)
def test_sums_of_an_evaluation(plant, texts, monkeypatch):
    right = step_file.Step.evaluate
    monkeypatch.setattr(step_file.Step, "evaluate", lambda step, *given: plant(*right(step, *given)))
    first = found(verified(), "evaluation", "", *texts)
    assert ("sum of the losses" in first.hint) == (plant is doubled)


def test_an_evaluation_that_draws(monkeypatch):
    right = composition.DeviceStep.sums

    def wrong(local, params, batch, state):
        key = jax.random.fold_in(jax.random.key(0), 0)
        loss = local._loss._replace(loss=lambda *given: local_loss(*given[:-2], key, given[-1]))
        local_loss, local._loss = local._loss.loss, loss
        return right(local, params, batch, state)

    monkeypatch.setattr(composition.DeviceStep, "sums", wrong)
    found(verified(DROPOUT), "evaluation", "", "that with the random numbers of step 0: an evaluation has none")


def test_a_model_that_cannot_be_evaluated_is_said():
    """It wants a key: what there is to compare is compared."""

    def loss(params, batch, key):
        jax.random.key_data(key)
        return DROPOUT.loss(params, batch, key)

    result = verified(Model(init=DROPOUT.init, loss=loss))
    assert result.ok, str(result)
    assert "evaluation (one device cannot evaluate the model)" in result.not_looked_at
    assert "evaluation" not in result.proved
