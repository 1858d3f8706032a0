"""Evaluation: doubled, weighed otherwise, with other metrics, averages or random numbers; loss scales."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import optax
import pytest
import toy
from planted import (
    DROPOUT,
    MODEL,
    batches,
    found,
    one_device_is_compiled_once,  # noqa: F401  (a fixture of every test here)
    verified,
)
from spmdkit.launch.run import verify as launch_verify
from spmdkit.parallel import Model, build_step, lay_out
from spmdkit.parallel.step import composition
from spmdkit.parallel.step import train_step as step_file
from spmdkit.parallel.verification.compare import FLOAT64, verify_step, x64
from spmdkit.parallel.verification.prepared import prepared
from spmdkit.training.optimizing.averaging import averaged


def doubled(total, weight):
    return 2 * total, 2 * weight


def heavier(total, weight):
    return total, weight + 1


@pytest.mark.parametrize(
    ("plant", "texts"),
    [
        (doubled, ("sum of the losses is", "2 times the reference", "The weight is")),
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


def measured(params, batch, key):
    total, weight = MODEL.loss(params, batch, key)
    return total, weight, {"rows": (weight, batch["weights"].size + 0.0 * weight)}


def test_metrics_of_an_evaluation(monkeypatch):
    """Its loss is right; a metric is summed over some of the devices."""
    right = composition.DeviceStep.sums

    def wrong(local, *given):
        sums = right(local, *given)
        return sums._replace(metrics=jax.tree.map(lambda each: each / 2, sums.metrics))

    model = Model(init=MODEL.init, loss=measured)
    assert verified(model).ok
    monkeypatch.setattr(composition.DeviceStep, "sums", wrong)
    first = found(verified(model), "evaluation", "metric 'rows'", "those of this metric are not")
    assert first.relative == pytest.approx(0.5)


def averages_verified():
    """ZeRO, whose averages are split over the devices that update them."""
    with x64(FLOAT64):
        model = prepared(MODEL, "float64")
        layouts = lay_out(model, {"data": {"size": 4, "zero": 1}}, precision=FLOAT64, devices=toy.devices(4))
        step = build_step(model, averaged(optax.sgd(0.1), 0.5), layouts, precision=FLOAT64)
        return verify_step(step, batches(), averages=launch_verify.averages_of(SimpleNamespace(layouts=layouts)))


def test_averages_of_parameters_are_evaluated_under_zero(monkeypatch):
    result = averages_verified()
    assert result.ok, str(result)
    assert "evaluation of the averages" in result.proved
    assert result.to_json()["averages_rel"] == result.averages_rel < 1e-12
    right = launch_verify.average_reader

    def wrong(plan):
        return lambda state: {**right(plan)(state), "first": state.params["first"]}

    monkeypatch.setattr(launch_verify, "average_reader", wrong)
    found(averages_verified(), "evaluation of the averages", "", "the averages among it, is right")


SCALED = replace(FLOAT64, loss_scale="dynamic", loss_scale_interval=5)


@pytest.mark.slow
def test_loss_scaling_is_looked_at():
    result = verified(precision=SCALED)
    assert result.ok, str(result)
    assert "a step that is not finite, and the loss scale" in result.proved
    assert verified(precision=replace(SCALED, loss_scale=1024.0)).loss_scale is None


@pytest.mark.parametrize(
    ("plant", "text"),
    [
        (lambda after, kept, state, following: (after, following), "A step whose gradients are not finite changes"),
        (lambda after, kept, state, following: (kept, state), "After a step whose gradients are not finite, the loss"),
        (
            lambda after, kept, state, following: (
                kept,
                following._replace(scale=state.scale.clip(max=following.scale)),
            ),
            "After a step that is number 5 in a row to be finite, the loss scale is 32768",
        ),
    ],
    ids=["not finite", "never changes", "never grows"],
)
def test_a_loss_scale_that_is_wrong(plant, text, monkeypatch):
    right = step_file.accept

    def wrong(after, before, state, norm, precision):
        kept, following = right(after, before, state, norm, precision)
        return plant(after, kept, state, following)

    monkeypatch.setattr(step_file, "accept", wrong)
    found(verified(precision=SCALED), "loss scale", "", text)
