from typing import NamedTuple

import jax.numpy as jnp
import pytest
from spmdkit.models.catalog import load_model
from spmdkit.parallel.model import Model
from spmdkit.parallel.model.arguments import as_model


def init(key):
    return {"w": jnp.zeros(3)}


def loss(params, batch, key):
    return jnp.sum(params["w"]), jnp.ones(())


class Pair(NamedTuple):
    init: object
    loss: object


class Mine:
    flops_per_row = 5.0

    def __init__(self, width=3):
        self.width = width

    def init(self, key):
        return {"w": jnp.zeros(self.width)}

    def loss(self, params, batch, key):
        return loss(params, batch, key)


def test_what_is_given_wins_over_the_data_and_zero_does_not():
    def rows(spec):
        model = load_model({"name": "transformer", **spec}, vocabulary=256, length=64)
        return model.init.__self__.config.vocabulary, model.init.__self__.config.length

    assert rows({}) == rows({"vocabulary": 0, "length": 0}) == (256, 64)
    assert rows({"vocabulary": 300, "length": 128}) == (300, 128)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "transfomer"}, "model.name='transfomer' is not a model. Did you mean transformer"),
        ({"name": "x"}, "Choose from transformer, moe, mlp, hugging_face, your own as module:function"),
        ({"layer": 2}, "model.layer is not an option. Did you mean layers"),
        ({"vocabulary": 100}, "model.vocabulary=100 is less than the data's 256"),
        ({"heads": 3}, "model.width=128 is not divisible by model.heads=3"),
    ],
)
def test_problems_of_reference_models(spec, message):
    with pytest.raises(ValueError, match=message):
        load_model({"name": "transformer", **spec}, vocabulary=256, length=64)


def test_classes_cover_those_of_the_data():
    assert load_model({"name": "mlp", "features": 4, "classes": 10}, classes=10).name == "mlp"
    with pytest.raises(ValueError, match=r"model\.classes=9 is less than the data's 10"):
        load_model({"name": "mlp", "features": 4, "classes": 9}, classes=10)


@pytest.mark.parametrize("result", [Model(init=init, loss=loss), (init, loss), Pair(init, loss), Mine()])
def test_what_a_function_may_return(user_module, result):
    user_module(make=lambda: result)
    model = load_model({"name": "mine:make"})
    assert isinstance(model, Model)
    assert model.init(None)["w"].shape == (3,)


def test_a_class_is_called_and_a_model_is_taken(user_module):
    user_module(Mine=Mine, pair=(init, loss), model=Model(init=init, loss=loss, name="my own"))
    model = load_model({"name": "mine:Mine", "width": 5})
    assert (model.name, model.flops_per_row) == ("mine:Mine", 5.0)
    assert model.init(None)["w"].shape == (5,)
    assert load_model({"name": "mine:pair"}).init is init
    assert load_model({"name": "mine:model"}).name == "my own"


def test_a_function_gets_what_it_asks_for(user_module):
    def make(width, vocabulary, length=3):
        return as_model((lambda key: {"w": jnp.zeros((width, vocabulary, length))}, loss))

    user_module(make=make)
    model = load_model({"name": "mine:make", "width": 2}, vocabulary=7, length=9)
    assert model.init(None)["w"].shape == (2, 7, 9)


@pytest.mark.parametrize("result", [None, 3, (init,), (init, 3), {"init": init}])
def test_wrong_returns(user_module, result):
    user_module(make=lambda: result)
    message = f"model.name='mine:make' returned a {type(result).__name__}. It must return"
    with pytest.raises(ValueError, match=message):
        load_model({"name": "mine:make"})
    user_module(make=3)
    with pytest.raises(ValueError, match="is a int: neither a function nor a model"):
        load_model({"name": "mine:make"})
