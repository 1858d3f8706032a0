"""Losses that a module collects beside its outputs (`sow`, regularizers, `add_loss`) are named, not dropped."""

import warnings
from functools import partial

import jax
import numpy as np
import pytest
from flax import linen, nnx
from spmdkit.models.adapters.library_model import adapt

pytestmark = pytest.mark.usefixtures("broadcasting")

BATCH = {
    "inputs": np.ones((2, 4), np.float32),
    "targets": np.zeros(2, np.int32),
    "weights": np.ones(2, np.float32),
    "example": np.arange(2, dtype=np.int32),
}


class Loss(nnx.Variable):
    """A variable of a loss, as Flax's guide defines one."""


class SowingNNX(nnx.Module):
    def __init__(self, kind, name, rngs):
        self.layer, self.norm = nnx.Linear(4, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)
        self.kind, self.name = kind, name

    def __call__(self, inputs):
        outputs = self.norm(self.layer(inputs))
        self.sow(self.kind, self.name, (outputs**2).mean())
        return outputs


class SowingLinen(linen.Module):
    collection: str
    name_of_value: str

    @linen.compact
    def __call__(self, inputs, train: bool = False):
        outputs = linen.BatchNorm(use_running_average=not train)(linen.Dense(3)(inputs))
        self.sow(self.collection, self.name_of_value, (outputs**2).mean())
        return outputs


def keras_with_a_regularizer():
    import keras

    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, kernel_regularizer="l2")])


SOWS = {
    "linen losses": (lambda: SowingLinen("losses", "value"), "losses/value"),
    "linen intermediates": (lambda: SowingLinen("intermediates", "aux_loss"), "intermediates/aux_loss"),
    "nnx variable": (lambda: partial(SowingNNX, Loss, "value"), "value"),
    "nnx intermediate": (lambda: partial(SowingNNX, nnx.Intermediate, "balance"), "balance"),
    "keras": (keras_with_a_regularizer, "1 loss of regularizers or add_loss"),
}


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.slow_cases("keras")
@pytest.mark.parametrize("form", SOWS)
def test_names_a_collected_loss_that_training_leaves_out(form):
    make, path = SOWS[form]
    with pytest.warns(UserWarning, match=f"training leaves out {path}, which the module collects beside its outputs"):
        model = adapt(make(), loss="softmax_cross_entropy", example=BATCH)
    params = model.init(jax.random.key(0))
    state = model.init_state(jax.random.key(1)) if model.init_state else ()
    after = model.loss(params, BATCH, jax.random.key(2), state).state
    assert jax.tree.structure(after) == jax.tree.structure(state), "what is sown is no state"


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize(
    "make", [lambda: SowingLinen("intermediates", "hidden"), lambda: partial(SowingNNX, nnx.Intermediate, "hidden")]
)
def test_collected_intermediate_values_are_no_losses(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        adapt(make(), loss="softmax_cross_entropy", example=BATCH)
