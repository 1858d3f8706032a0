"""Mistakes around a module, as somebody makes them who is new to the runtime: each is told in one message.

Options of everything that `model.name` may lead to; then what modules, losses and data do to each other.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.models.catalog import load_model
from spmdkit.parallel.sharding.model_errors import check_loss
from support import forms_of_names

pytestmark = pytest.mark.usefixtures("broadcasting")
ROWS, FEATURES = 8, forms_of_names.FEATURES
MODULES = (
    *("NNXClass", "nnx_maker", "nnx_function", "EquinoxClass", "equinox_maker", "EquinoxFields"),
    *("LinenClass", "linen_function", "KerasClass", "keras_function"),
)
FORMS = (*MODULES, "own_function", "OwnClass", "OwnFields")


@pytest.fixture
def load(monkeypatch):
    """Loads a model of a form by a config's section."""

    def load(form, **options):
        if form.lower().startswith("keras"):
            for each in forms_of_names.keras_forms():
                monkeypatch.setattr(forms_of_names, each.__name__, each, raising=False)
        spec = {"name": f"support.forms_of_names:{form}", **options}
        if form in MODULES:
            spec = {"loss": "softmax_cross_entropy", **spec}
        return load_model(spec, vocabulary=7, example=example)

    return load


def example():
    return {"inputs": np.ones((1, FEATURES), np.float32), "targets": np.zeros(1, np.int32)}


def message(function, *arguments, **options):
    with pytest.raises(UserError) as caught:
        function(*arguments, **options)
    return str(caught.value)


SLOW = [pytest.param(form, marks=pytest.mark.slow if form.lower().startswith("keras") else ()) for form in FORMS]


@pytest.mark.parametrize("form", SLOW)
class TestOptions:
    """Of every form: an option that is missing, unknown, misspelled, or of a wrong type."""

    def test_right_ones_make_a_model(self, form, load):
        model = load(form, width=3, depth=1)
        assert jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))), form

    def test_missing(self, form, load):
        assert message(load, form) == f"model.width is required: {form} lacks a default for it."

    def test_unknown(self, form, load):
        told = message(load, form, width=3, colour="red")
        if form == "KerasClass":  # it takes any, and Keras itself refuses
            assert "Unrecognized keyword arguments passed to KerasClass: {'colour': 'red'}" in told
        else:
            assert told.startswith(f"model.colour is not an option of {form}. The options are width, depth")

    def test_misspelled(self, form, load):
        told = message(load, form, widht=3)
        assert form == "KerasClass" or f"model.widht is not an option of {form}. Did you mean width?" in told
        assert f"model.width is required: {form} lacks a default for it." in told

    def test_wrong_type(self, form, load):
        told = message(load, form, width=3, depth="2")
        assert told == f"model.depth must be an integer, got '2' (string): {form} takes depth: int."


@pytest.mark.parametrize("form", ["NNXClass", "nnx_maker", "EquinoxClass", "nnx_function", "LinenClass"])
def test_a_type_that_no_annotation_says(form, load):
    told = message(load, form, width="64")
    annotated = f"model.width must be an integer, got '64' (string): {form} takes width: int."
    plain = (
        "model.width is the text '64', because it is in quotes. Remove them to pass a number; if "
        f"{form} takes text, annotate it: width: str."
    )
    assert told in (annotated, plain)


@pytest.mark.parametrize("form", ["NNXClass", "nnx_maker", "EquinoxClass", "equinox_maker", "LinenClass"])
def test_a_module_without_a_loss(form):
    told = message(load_model, {"name": f"support.forms_of_names:{form}", "width": 3}, example=example)
    assert "model.loss is missing. Set it to softmax_cross_entropy" in told
    told = message(load_model, {"name": f"support.forms_of_names:{form}", "width": 3, "losss": "squared_error"})
    assert told.startswith(f"model.losss is not an option of {form}. Did you mean loss?")


def test_the_argument_that_draws_is_no_option(load):
    assert "model.rngs is not an option" in message(load, "NNXClass", width=3, rngs=0)
    assert "model.key is not an option" in message(load, "EquinoxClass", width=3, key=0)


def test_sizes_of_the_data_are_given_to_what_asks_for_them(monkeypatch):
    given = {}

    class Asking(forms_of_names.NNXClass):
        def __init__(self, vocabulary, rngs, length=0):
            given.update(vocabulary=vocabulary, length=length)
            super().__init__(vocabulary, rngs=rngs)

    monkeypatch.setattr(forms_of_names, "Asking", Asking, raising=False)
    spec = {"name": "support.forms_of_names:Asking", "loss": "softmax_cross_entropy"}
    load_model(spec, vocabulary=7, length=5, example=example)
    assert given == {"vocabulary": 7, "length": 5}
    load_model({**spec, "vocabulary": 9}, vocabulary=7, example=example)
    assert given == {"vocabulary": 9, "length": 0}


def test_a_module_that_is_there_takes_no_options(monkeypatch):
    monkeypatch.setattr(forms_of_names, "there", forms_of_names.LinenClass(3), raising=False)
    spec = {"name": "support.forms_of_names:there", "loss": "softmax_cross_entropy"}
    assert load_model(spec, example=example).name == "support.forms_of_names:there"
    told = message(load_model, {**spec, "width": 4}, example=example)
    assert told == (
        "model.name='support.forms_of_names:there' is a model, not a function: it does not take options such as width."
    )


# What modules, losses and data do to each other

HEAD = """
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
"""
NNX = """
class Net(nnx.Module):
    def __init__(self, rngs):
        self.only = nnx.Linear({features}, 3, rngs=rngs)

    def __call__(self, x):
        return {result}
"""
LINEN = """
class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return {result}
"""
EQUINOX = """
class Net(eqx.Module):
    only: eqx.nn.Linear

    def __init__(self, key):
        self.only = eqx.nn.Linear({features}, 3, key=key)

    def __call__(self, x):
        return {result}
"""
RIGHT = {"features": FEATURES, "result": "self.only(x)"}
LOSS = "def loss(outputs, batch):\n    return {}\n"
TABLE = {
    "nnx, another number of features": (
        NNX.format(**{**RIGHT, "features": 5}),
        {},
        ["line 14 (return self.only(x)): ", "inputs float32 (8, 4)"],
    ),
    "linen, an embedding of floats": (
        LINEN.format(result="nn.Embed(7, 3)(x)"),
        {},
        ["the module fails in ", "Input type must be an integer", "One row of the data, as model.inputs gives it to"],
    ),
    "linen, an undefined name": (
        LINEN.format(result="nn.Dense(3)(y)"),
        {},
        ["line 12 (return nn.Dense(3)(y)): NameError: name 'y' is not defined. One row of the data", "float32 (1, 4)"],
    ),
    "linen, an argument that nothing gives": (
        LINEN.format(result="nn.Dense(3)(x + z_rng)").replace("(self, x)", "(self, x, z_rng)"),
        {},
        ["Net.__call__(x, z_rng) cannot be called with 1 argument: missing a required argument: 'z_rng'"],
    ),
    "nnx, rngs forgotten": (
        NNX.format(**RIGHT).replace(", rngs=rngs)", ")"),
        {},
        ["line 11 (self.only = nnx.Linear(4, 3)): TypeError: ", "'rngs'"],
    ),
    "equinox, key forgotten": (
        EQUINOX.format(**RIGHT).replace(", key=key)", ")"),
        {},
        ["line 13 (self.only = eqx.nn.Linear(4, 3)): TypeError: ", "'key'"],
    ),
    "a module that returns a tuple": (
        NNX.format(**{**RIGHT, "result": "self.only(x), x"}),
        {},
        ["softmax_cross_entropy requires one array, but the module returns a tuple of float32 (8, 3), float32 (8, 4)."],
    ),
    "a module that returns a dict, and a metric": (
        NNX.format(**{**RIGHT, "result": "{'logits': self.only(x)}"}) + LOSS.format("outputs['logits'].sum(1)"),
        {"loss": "module:loss", "metrics": ["accuracy"]},
        ["accuracy requires one array, but the module returns a dict of float32 (8, 3)."],
    ),
    "outputs of another shape than targets": (
        NNX.format(**{**RIGHT, "result": "self.only(x)[:, 0]"}),
        {},
        ["logits (..., classes) with integers (...), got outputs float32 (8,) and targets int32 (8,)."],
    ),
    "as many outputs as targets": (
        NNX.format(**RIGHT),
        {"loss": "squared_error", "metrics": "accuracy"},
        ["squared_error requires as many numbers as there are targets, got outputs float32 (8, 3) and targets"],
    ),
    "a loss that is a mean": (
        NNX.format(**RIGHT) + LOSS.format("outputs.mean()"),
        {"loss": "module:loss"},
        ["loss returned an array of shape () for 8 rows. It must return one number for each row"],
    ),
    "a loss that reads labels": (
        NNX.format(**RIGHT) + LOSS.format('optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"])'),
        {"loss": "module:loss"},
        [
            "KeyError: 'labels'. On each device the batch contains inputs float32 (8, 4), targets",
            "(did you mean targets)",
        ],
    ),
    "inputs of another name": (
        NNX.format(**RIGHT),
        {"inputs": "image"},
        ["inputs='image' is not an array of the batch, which has example, inputs, targets. Did you mean 'inputs'?"],
    ),
    "inputs that fail": (
        NNX.format(**RIGHT) + "def pixels(batch):\n    return batch['pixels']\n",
        {"inputs": "module:pixels"},
        [
            "inputs fails in ",
            "line 16 (return batch['pixels']): KeyError: 'pixels'. The batch does not contain 'pixels', only "
            "example, inputs",
        ],
    ),
    "equinox, a layer with a state that nobody takes": (
        EQUINOX.format(**RIGHT)
        .replace("only: eqx.nn.Linear", "only: eqx.nn.BatchNorm")
        .replace("eqx.nn.Linear(4, 3, key=key)", 'eqx.nn.BatchNorm(4, axis_name="batch", mode="batch")'),
        {},
        [
            "arrays outside of its state that are not floating-point",
            "such as batch norm, need __call__(self, x, state) -> ",
        ],
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_mistake_is_one_message_with_its_line(name, tmp_path, monkeypatch):
    text, options, told = TABLE[name]
    (tmp_path / "module.py").write_text(HEAD + text)
    monkeypatch.setitem(sys.modules, "module", None)
    del sys.modules["module"]  # as it was, once the test is over: not there
    spec = {"name": "module:Net", "loss": "softmax_cross_entropy", **options}
    given = {
        "inputs": jax.ShapeDtypeStruct((ROWS, FEATURES), jnp.float32),
        "targets": jax.ShapeDtypeStruct((ROWS,), jnp.int32),
        "example": jax.ShapeDtypeStruct((ROWS,), jnp.int32),
    }
    found = message(lambda: check_loss(load_model(spec, search_path=[tmp_path], example=example), given))
    assert [part for part in told if part not in found] == [], found
    assert len(found) < 1200
    assert "\x1b" not in found


def test_one_hot_targets_name_the_fix():
    from spmdkit.models.adapters.row_loss import softmax_cross_entropy

    outputs = jnp.zeros((2, 3))
    told = message(softmax_cross_entropy, outputs, {"targets": jnp.zeros((2, 3))})
    assert told.endswith("Give the number of the class instead of one-hot rows: targets.argmax(-1).")
    told = message(softmax_cross_entropy, outputs, {"labels": jnp.zeros((2, 3)), "inputs": outputs})
    assert "but the batch has labels, inputs. Give data with that name" in told


def test_a_class_of_equinox_with_a_state_is_parted_from_it():
    import equinox as eqx
    from spmdkit.models.adapters.library_model import adapt

    class Net(eqx.Module):
        norm: eqx.nn.BatchNorm

        def __init__(self, key):
            self.norm = eqx.nn.BatchNorm(FEATURES, axis_name="batch", mode="batch")

        def __call__(self, x, state):
            return self.norm(x, state)

    model = adapt(Net, loss="softmax_cross_entropy", example=example())
    pair = adapt(lambda key: eqx.nn.make_with_state(Net)(key), loss="softmax_cross_entropy", example=example())
    shapes = [jax.eval_shape(each.init_state, jax.random.key(0)) for each in (model, pair)]
    assert jax.tree.leaves(shapes[0])
    assert shapes[0] == shapes[1]


OF_ARGUMENTS = {
    "a module of no library": ({"module": {}}, "adapt does not support a dict. It takes a module of Flax Linen"),
    "metrics of a list": ({"metrics": ["accuracy"]}, "adapt: metrics must be a mapping {name: function}, got a list."),
    "an example of a list": ({"example": [1, 2]}, "adapt: example must be a mapping {inputs: array}, got a list."),
    "inputs of a number": ({"inputs": 5}, "adapt: inputs=5 (int) must be the name of an array of the batch, a list of"),
    "inputs with a number": ({"inputs": ["inputs", 5]}, "adapt: inputs=5 (int) must be the name of an array"),
    "no inputs": ({"inputs": []}, "adapt: inputs=[] (list) must be the name of an array of the batch, a list of names"),
    "an example of a number": ({"example": {"inputs": 3.0}}, "example['inputs'] must be an array with rows on dim 0"),
    "an example of a list of numbers": ({"example": {"inputs": [3.0]}}, "got [3.0] (list). Use np.asarray"),
    "an example of a scalar": ({"example": {"inputs": np.float32(3)}}, "on dim 0, got a scalar, without dims"),
    "an example without rows": ({"example": {"inputs": np.zeros((0, 3))}}, "on dim 0, got no rows, shape (0, 3)"),
    "an example of nothing": ({"example": []}, "adapt: example must be a mapping {inputs: array}, got a list."),
    "a loss of one argument": ({"loss": lambda outputs: outputs}, "loss must take (outputs, batch); the function in "),
    "a metric of one argument": ({"metrics": {"a": len}}, "metrics.a must take (outputs, batch); the function in len"),
    "rngs to nothing": ({"module": lambda rngs: None}, "The function of rngs returned a NoneType. Return a flax.nnx"),
    "key to nothing": ({"module": lambda key: None}, "The function of key returned a NoneType. Return an equinox"),
    "integer losses": ({"loss": lambda o, b: b["targets"]}, "loss returned int32, which is not differentiable."),
    "complex losses": ({"loss": lambda o, b: o[:, 0] * 1j}, "loss returned complex64. Return real numbers"),
    "complex metrics": ({"metrics": {"a": lambda o, b: o[:, 0] * 1j}}, "metrics.a returned complex64. Return real"),
}


@pytest.mark.parametrize("name", OF_ARGUMENTS)
def test_rejects_arguments_of_adapt(name):
    from flax import linen as nn
    from spmdkit.models.adapters.library_model import adapt

    options, said = OF_ARGUMENTS[name]
    given = {"module": nn.Dense(3), "loss": "softmax_cross_entropy", "example": example(), **options}

    def call():
        model = adapt(given.pop("module"), **given)
        batch = {**example(), "example": np.zeros(1, np.int32)}
        jax.eval_shape(model.loss, jax.eval_shape(model.init, jax.random.key(0)), batch, None)

    assert said in message(call)
