"""A mistake in one of a model's functions is one message, with the file and line, before anything is compiled."""

import inspect
import sys
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from spmdkit.models import MLPConfig, mlp
from spmdkit.parallel import Model, lay_out
from spmdkit.parallel.options import FLOAT32
from spmdkit.parallel.sharding.lay_out import abstract_parameters
from spmdkit.parallel.sharding.model_errors import ModelError, abstract_state, check_loss
from support import toy

HERE = __file__


def shapes(**arrays):
    return {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, (dtype, *shape) in arrays.items()}


BATCH = shapes(inputs=("float32", 8, 4), targets=("int32", 8), weights=("float32", 8), example=("int32", 8))
TEXT = shapes(inputs=("int32", 8, 4), targets=("int32", 8, 4), weights=("float32", 8, 4), example=("int32", 8))


def init(key):
    return {"kernel": jax.random.normal(key, (4, 3)), "bias": jnp.zeros(3)}


def loss(params, batch, key):
    return toy.cross_entropy(batch["inputs"] @ params["kernel"] + params["bias"][None], batch)


def line_of(function, text):
    """The line of this file on which a text of a function stands."""
    lines, first = inspect.getsourcelines(function)
    return next(first + number for number, line in enumerate(lines) if text in line)


def error_of(function, *arguments, **options):
    with pytest.raises(ModelError) as caught:
        function(*arguments, **options)
    return str(caught.value)


def of_loss(loss, batch=BATCH, **options):
    return error_of(check_loss, Model(init=init, loss=loss, name="mine"), batch, **options)


def of_init(init):
    return error_of(abstract_parameters, Model(init=init, loss=loss, name="mine"), FLOAT32)


def of_blocks(batch=TEXT, **functions):
    return error_of(check_loss, replace(toy.BLOCK_MODEL, name="mine", **functions), batch)


def test_right_models_pass():
    check_loss(Model(init=init, loss=loss), BATCH, evaluates=True)
    check_loss(toy.BLOCK_MODEL, TEXT, compute="bfloat16", evaluates=True)


def images(params, batch, key):
    return (batch["images"] @ params["kernel"]).sum(), batch["weights"].sum()


def test_rejects_arrays_missing_from_the_batch():
    message = of_loss(images)
    line = line_of(images, "return")
    code = 'return (batch["images"] @ params["kernel"]).sum(), batch["weights"].sum()'
    assert message == (
        f"model 'mine': loss fails in {HERE}, line {line} ({code}): KeyError: 'images'. On each device the batch "
        "contains inputs float32 (8, 4), targets int32 (8,), weights float32 (8,), example int32 (8,); the "
        "parameters are "
        "bias float32 (3,), kernel float32 (4, 3). Use a valid name (did you mean inputs), or add data with that name."
    )


def test_explains_shape_mismatches():
    message = of_loss(loss, {**BATCH, **shapes(inputs=("float32", 8, 5))})
    assert f"in {HERE}, line {line_of(loss, 'return')} (return toy.cross_entropy(" in message
    assert "inputs float32 (8, 5)" in message
    assert message.endswith("kernel float32 (4, 3).")


def test_parameters_come_in_the_compute_dtype():
    def only_float32(params, batch, key):
        if params["kernel"].dtype != jnp.float32:
            raise RuntimeError("it has to be float32")
        return loss(params, batch, key)

    check_loss(Model(init=init, loss=only_float32), BATCH)
    message = of_loss(only_float32, compute="bfloat16")
    assert "RuntimeError: it has to be float32. On each device" in message
    assert "kernel bfloat16 (4, 3)" in message


def test_rejects_losses_that_need_a_key_in_evaluation():
    def draws(params, batch, key):
        return loss(params, batch, key)[0] * jax.random.uniform(key), batch["weights"].sum()

    check_loss(Model(init=init, loss=draws), BATCH)
    message = of_loss(draws, evaluates=True)
    assert "loss without a key, as in evaluation, fails in" in message
    assert message.endswith("in evaluation key is None, so draw random numbers only `if key is not None`.")
    assert "if key is not None" not in of_loss(images, evaluates=True), "it fails with a key too"
    assert f"line {line_of(draws, 'uniform')}" in message


@pytest.mark.parametrize(
    ("function", "name", "wanted"),
    [
        (lambda params, batch: (0.0, 0.0), "loss", "params, batch, key"),
        (lambda: {}, "init", "key"),
        (lambda params: 0, "predict", "params, batch"),
    ],
)
def test_rejects_wrong_numbers_of_arguments(function, name, wanted):
    model = Model(**{"init": init, "loss": loss, "name": "mine", name: function})
    message = error_of(check_loss, model, BATCH)
    line = function.__code__.co_firstlineno
    assert message == (
        f"model 'mine': {name}, in {HERE}, line {line}, cannot be called with ({wanted}), as the runtime calls it. "
        "Give it these arguments, in this order."
    )


def test_functions_behind_others_are_found():
    """Partial applications, methods and objects that are called."""

    class Mine:
        def init(self, key):
            return init(key)

        def loss(self, params, batch):
            return 0.0

    class Called:
        def __call__(self, batch):
            return 0.0

    for function in (Mine().loss, partial(lambda scale, batch: 0.0, 2), Called()):
        message = error_of(check_loss, Model(init=Mine().init, loss=function), BATCH)
        assert f"loss, in {HERE}, line " in message
    check_loss(Model(init=Mine().init, loss=partial(lambda scale, *given: loss(*given), 2)), BATCH)


def test_rejects_invalid_loss_results():
    def wrong(params, batch, key):
        return loss(params, batch, key)[0]

    message = of_loss(wrong)
    assert f"model 'mine': loss, in {HERE}, line {line_of(wrong, 'def wrong')}, returns 1 value, float32 ()" in message
    assert (
        "a pair of floating-point scalars, (sum of loss x weight, sum of weights) over the rows it is given" in message
    )


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"steps": jnp.int32(0)}, "more/steps is int32 ()"),
        ({"mask": jnp.ones(3, bool)}, "more/mask is bool (3,)"),
        ({"dropout": jax.random.key}, "more/dropout is a random key"),
        ({"scale": 0.5}, "more/scale is 0.5 of type float"),
        ({"name": "x"}, "more/name is 'x' of type str"),
    ],
)
def test_rejects_invalid_parameters(extra, problem):
    def wrong(key):
        return {**init(key), "more": {name: leaf(0) if callable(leaf) else leaf for name, leaf in extra.items()}}

    message = of_init(wrong)
    line = wrong.__code__.co_firstlineno
    assert message.startswith(f"model 'mine': init, in {HERE}, line {line}, returns invalid parameters: {problem}. ")
    assert "Do not return constants, counters and keys from init: create them in the loss" in message


@dataclass
class Layer:
    kernel: jax.Array


def test_explains_registering_dataclasses():
    message = of_init(lambda key: {"layer": Layer(jnp.zeros(2)), "other": Layer(jnp.ones(3))})
    assert message.endswith("call jax.tree_util.register_dataclass(Layer).")
    assert "register_dataclass" not in of_init(lambda key: {"a": 0.5})
    model = Model(init=init, loss=loss, init_state=lambda key: Layer(jnp.zeros(2)))
    with pytest.raises(ModelError, match=r"call jax\.tree_util\.register_dataclass\(Layer\)\.$"):
        abstract_state(model)


def test_rejects_empty_parameters():
    message = error_of(check_loss, Model(init=lambda key: {}, loss=loss), BATCH)
    assert "returns an empty tree of parameters ({}): there is nothing to train." in message


def test_locates_exceptions_of_init():
    def wrong(key):
        return {"kernel": jnp.zeros((4, 3)) @ jnp.zeros((4, 3))}

    message = of_init(wrong)
    assert message.startswith(f"model 'mine': init fails in {HERE}, line {line_of(wrong, 'return')} (return {{")


def changed(part):
    def blocks(key):
        params = toy.init(key)
        return {**params, **part(params)}

    return blocks


def test_rejects_blocks_that_are_not_stacked():
    def wrong(params):
        return {"blocks": {**params["blocks"], "scale": jnp.ones(toy.WIDTH)}}

    message = of_blocks(init=changed(wrong))
    assert "returns blocks that are not num_blocks=3 stacked on dim 0: blocks/scale is float32 (16,)." in message
    message = error_of(lay_out, replace(toy.BLOCK_MODEL, num_blocks=4), {"data": 1}, devices=toy.devices(1))
    assert (
        "num_blocks=4 stacked on dim 0: blocks/down is float32 (3, 64, 16), blocks/scale is float32 (3, 16)" in message
    )


def test_rejects_missing_groups():
    def without_head(key):
        params = toy.init(key)
        return {name: params[name] for name in ("embed", "blocks")}

    assert "returns the groups blocks, embed without 'head'. A BlockModel" in of_blocks(init=without_head)
    assert "returns list without 'embed'. A BlockModel" in of_blocks(init=lambda key: [jnp.zeros(3)])
    assert "without 'table'. " in of_blocks(embed_reads=("table",))


def test_rejects_blocks_that_change_activations():
    def narrower(params, x, key):
        return toy.block(params, x, key)[..., :8]

    message = of_blocks(block=narrower)
    line = narrower.__code__.co_firstlineno
    assert f"block, in {HERE}, line {line}, changes x from float32 (8, 4, 16) to float32 (8, 4, 8). " in message
    message = of_blocks(block=lambda params, x, key: toy.block(params, x, key).astype(jnp.bfloat16))
    assert (
        "changes x from float32 (8, 4, 16) to bfloat16 (8, 4, 16). Every block gets the result of the previous"
        in message
    )
    message = of_blocks(block=lambda params, x, key: {"x": x})
    assert "changes x from float32 (8, 4, 16) to nothing, x from nothing to float32 (8, 4, 16)." in message


def test_rejects_failing_parts_and_invalid_heads():
    message = of_blocks(block=lambda params, x, key: x @ params["sideways"])
    assert "model 'mine': block fails in" in message
    assert "KeyError: 'sideways'" in message
    assert "head, in" in of_blocks(head=lambda groups, x, batch, key: x.sum())


def test_internal_errors_are_not_model_errors(monkeypatch):
    model = mlp(MLPConfig(features=4, classes=3, widths=(8,)))
    monkeypatch.setattr(sys.modules["spmdkit.models.mlp"], "jnp", None)
    with pytest.raises(AttributeError):
        check_loss(model, BATCH)
