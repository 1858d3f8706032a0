"""Steps done once more, one at a time: is it the loss of a later step, or the update, and how did a parameter move?"""

from types import SimpleNamespace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.parallel.verification.reference import Sums
from spmdkit.parallel.verification.update_cause import Training, of_parameters

FIRST, GRADIENT, RATE = np.array([1.0, 2.0, 4.0]), np.array([1.0, -3.0, 2.0]), 0.1
BATCHES = [{"n": 0}, {"n": 1}, {"n": 2}]


class State(NamedTuple):
    params: dict
    opt_state: dict
    model_state: tuple = ()


class OneDevice:
    """Gradient descent on one device; the loss of a batch depends on the step's random numbers."""

    def to_model(self, params):
        return params

    def first_state(self, params):
        return {"count": np.zeros(1)}

    def sums_in_order(self, params, batch, step, state=()):
        return Sums(float(params["w"].sum()) * 2 + 10 * step, 2.0, {"w": GRADIENT})

    def update(self, params, opt_state, sums):
        return {"w": params["w"] - RATE * sums.gradients["w"]}, {"count": opt_state["count"] + 1}


class Step:
    """The step of a strategy, whose loss, update and optimizer's state a test may plant."""

    def __init__(self, *, loss=lambda loss, number: loss, move=lambda before, moved: moved, count=1):
        self.loss, self.move, self.count = loss, move, count
        self.plan = SimpleNamespace(pipeline=None)
        self.right = OneDevice()

    def init(self, seed):
        return State({"w": jnp.asarray(FIRST)}, {"count": jnp.zeros(1)})

    def __call__(self, state, batch):
        before = np.asarray(state.params["w"])
        sums = self.right.sums_in_order(state.params, batch, batch["n"])
        moved = self.move(before, -RATE * GRADIENT)
        state = State({"w": jnp.asarray(before + moved)}, {"count": state.opt_state["count"] + self.count})
        return state, SimpleNamespace(loss=self.loss(sums.total / sums.weight, batch["n"]))


def told(losses=(1.0, 1.0, 1.0), **planted):
    training = Training(Step(**planted), OneDevice(), BATCHES, 0, 1e-5, 1e-5)
    return of_parameters("w", training, losses, (1.0, 1.0, 1.0))


def test_when_the_losses_part_is_said():
    assert told().startswith("The gradients of the first step and their norm are right, and the losses of all steps")
    text = told(losses=(1.0, 1.0, 1.1), move=lambda before, moved: 2 * moved)
    assert "and the losses agree until step 2, so it is the update" in text


def test_each_update_alone_is_right():
    assert told().endswith("; each update alone is that of one device.")


@pytest.mark.parametrize(
    ("move", "text"),
    [
        (lambda before, moved: 0 * moved, "w does not move."),
        (lambda before, moved: 3 * moved, "its change is 3 times the reference in every element."),
        (
            lambda before, moved: moved - 0.01 * before,
            "w has -0.01 times itself added, beyond the update of one device.",
        ),
        (lambda before, moved: moved[::-1], "its change is the same numbers in other places."),
        (lambda before, moved: moved + np.array([0.0, 0.5, 0.1]), "its change is no multiple of the reference;"),
    ],
    ids=["still", "far", "decayed", "ordered", "other"],
)
def test_how_a_parameter_moved(move, text):
    assert f"so it is the update: {text}" in told(move=move)


def test_the_optimizers_state_that_is_off_is_named():
    assert "Of the optimizer's state, count is off by 1.0e+00." in told(move=lambda _, moved: 3 * moved, count=2)
    assert "Of the optimizer's state" not in told(move=lambda _, moved: 3 * moved)


def test_a_loss_with_the_random_numbers_of_another_step():
    text = told(loss=lambda loss, number: loss - 5 * number)
    assert "at the same parameters, the loss of step 1 is" in text
    assert text.endswith("It is that with the random numbers of step 0: the step is not folded into the key.")
    assert "update" not in text


def test_a_loss_that_is_wrong_otherwise():
    text = told(loss=lambda loss, number: loss + (number == 2))
    assert "at the same parameters, the loss of step 2 is" in text
    assert text.endswith("on one device.")
