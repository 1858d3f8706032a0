"""Modules of Flax, Equinox and Keras, as their own documentation writes them, train as in their own library."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spmdkit.configs import load_config
from spmdkit.mesh.errors import UserError
from spmdkit.models.adapters.library_model import adapt
from spmdkit.models.catalog import load_model
from spmdkit.parallel import FSDPConfig, build_step, lay_out
from spmdkit.runtime.loading.load_run import load_run
from spmdkit.runtime.train import train
from spmdkit.training.metrics import read_metrics
from support import toy
from support.forms_of_names import keras_in
from support.runs import EXAMPLES, example

pytestmark = pytest.mark.usefixtures("broadcasting")
ROWS, FEATURES, WIDTH, CLASSES, STEPS, RATE = 16, 8, 16, 8, 3, 0.1
MESHES = {
    "data x fsdp": {"data": 2, "fsdp": FSDPConfig(size=4, floor_bytes=1)},
    "data x tensor": {"data": 2, "tensor": 4},  # split by XLA, as rules over the library's own paths say
}
RULES = {
    "linen": {"Dense_0/kernel": [None, "tensor"], "BatchNorm_.*": ["tensor"], "Dense_1/kernel": ["tensor", None]},
    "nnx": {"first/kernel": [None, "tensor"], "norm/.*": ["tensor"], "second/kernel": ["tensor", None]},
    "equinox": {"first/weight": ["tensor", None], "norm/.*": ["tensor"], "second/weight": [None, "tensor"]},
    "keras": {"net/dense[^/]*/kernel": [None, "tensor"], "net/batch_[^/]*/.*": ["tensor"]},
}


def batch(seed):
    random = np.random.default_rng(seed)
    rows = toy.labelled(random, ROWS, FEATURES, classes=CLASSES)
    return {**rows, "weights": random.uniform(0.5, 1.5, ROWS), "example": rows["example"] + ROWS * seed}


def mean_loss(logits, rows):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows["targets"])
    return (losses * rows["weights"]).sum() / rows["weights"].sum()


def accuracy(logits, rows):
    return float(((logits.argmax(-1) == rows["targets"]) * rows["weights"]).sum() / rows["weights"].sum())


# Each: a module, its parameters, and what its own library makes of it, see `trained`.


def trained(apply, params, state):
    """Trains with plain JAX; returns the losses, and accuracy and loss of an evaluation afterwards.

    Args:
        apply: (params, state, inputs, training) -> (logits, next state), as the library calls a module.
        params: The parameters.
        state: The statistics of its batch norm.
    """

    @jax.jit
    def differentiate(params, state, rows):
        def loss(params):
            logits, after = apply(params, state, rows["inputs"], True)
            return mean_loss(logits, rows), after

        return jax.value_and_grad(loss, has_aux=True)(params)

    losses = []
    for seed in range(STEPS):
        (value, state), gradients = differentiate(params, state, batch(seed))
        params = jax.tree.map(lambda leaf, slope: leaf - RATE * slope, params, gradients)
        losses.append(float(value))
    logits, _ = apply(params, state, batch(9)["inputs"], False)
    return losses, accuracy(logits, batch(9)), mean_loss(logits, batch(9))


@cache
def linen():
    from flax import linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool):
            x = nn.Dense(WIDTH, use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            return nn.Dense(CLASSES)(nn.relu(x))

    module = Net()
    variables = module.init(jax.random.key(0), batch(0)["inputs"], train=False)
    variables = jax.tree.map(lambda leaf: leaf.astype("float64"), variables)

    def apply(params, stats, x, training):
        given = {"params": params, "batch_stats": stats}
        logits, changed = module.apply(given, x, train=training, mutable=["batch_stats"])
        return logits, changed["batch_stats"]

    return module, variables["params"], *trained(apply, variables["params"], variables["batch_stats"])


@cache
def nnx():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first = nnx.Linear(FEATURES, WIDTH, use_bias=False, param_dtype=jnp.float64, rngs=rngs)
            self.norm = nnx.BatchNorm(WIDTH, param_dtype=jnp.float64, rngs=rngs)
            self.second = nnx.Linear(WIDTH, CLASSES, param_dtype=jnp.float64, rngs=rngs)

        def __call__(self, x):
            return self.second(nnx.relu(self.norm(self.first(x))))

    module = Net(nnx.Rngs(0))
    graph, params, stats = nnx.split(module, nnx.Param, ...)

    def apply(params, stats, x, training):
        own = nnx.merge(graph, *jax.tree.map(lambda leaf: leaf, (params, stats)))  # variables of this trace
        own.train() if training else own.eval()
        return own(x), nnx.state(own, nnx.BatchStat)

    wide = jax.tree.map(lambda leaf: leaf.astype("float64"), stats)
    return module, nnx.to_pure_dict(params), *trained(apply, params, wide)


@cache
def equinox():
    import equinox as eqx

    class Net(eqx.Module):
        first: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        second: eqx.nn.Linear

        def __init__(self, key):
            first, second = jax.random.split(key)
            self.first = eqx.nn.Linear(FEATURES, WIDTH, use_bias=False, dtype="float64", key=first)
            self.norm = eqx.nn.BatchNorm(WIDTH, axis_name="batch", mode="batch", dtype="float64")
            self.second = eqx.nn.Linear(WIDTH, CLASSES, dtype="float64", key=second)

        def __call__(self, x, state):
            x, state = self.norm(self.first(x), state)
            return self.second(jax.nn.relu(x)), state

    model, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    own, static = eqx.partition(model, eqx.is_inexact_array)

    def apply(own, state, x, training):
        whole = eqx.combine(own, static)
        run = whole if training else eqx.nn.inference_mode(whole)
        return jax.vmap(run, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)

    params = {
        "first": {"weight": model.first.weight},
        "norm": {"weight": model.norm.weight, "bias": model.norm.bias},
        "second": {"weight": model.second.weight, "bias": model.second.bias},
    }
    return (model, state), params, *trained(apply, own, state)


@cache
def keras():
    keras = keras_in("float64")
    layers = keras.layers
    module = keras.Sequential(
        [
            layers.Input((FEATURES,)),
            layers.Dense(WIDTH, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dense(CLASSES),
        ],
        name="net",
    )
    own, kept = ([each.value for each in of] for of in (module.trainable_variables, module.non_trainable_variables))
    params: dict = {}
    for variable, value in zip(module.trainable_variables, own, strict=True):
        _, layer, name = variable.path.split("/")
        params.setdefault("net", {}).setdefault(layer, {})[name] = value

    def apply(own, kept, x, training):
        return module.stateless_call(own, kept, x, training=training)

    return module, params, *trained(apply, own, kept)


LIBRARIES = {"linen": linen, "nnx": nnx, "equinox": equinox, "keras": keras}
TOLERANCE = {"keras": 1e-6}
"""Of a loss; 1e-9 elsewhere. Keras's batch norm computes in float32 under `jit`, whatever its dtype policy says."""
UNCHECKED = "ignore:The model does not pass JAX's checks"


def adapted(module):
    return adapt(
        module, loss="softmax_cross_entropy", metrics={"accuracy": "accuracy"}, example=batch(0), name="adapted"
    )


@pytest.mark.long_cases("equinox-data x tensor", "keras-data x tensor", "nnx-data x tensor")
@pytest.mark.filterwarnings(UNCHECKED)
@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_training_is_that_of_its_own_library(library, mesh):
    with jax.enable_x64(True):
        module, params, losses, right, evaluated = LIBRARIES[library]()
        model = adapted(module)
        rules = RULES[library] if "tensor" in mesh else None
        plan = lay_out(model, MESHES[mesh], rules=rules, precision=toy.FLOAT64)
        step = build_step(model, optax.sgd(RATE), plan, precision=toy.FLOAT64)
        state, found = step.init(0, params=jax.tree.map(np.asarray, params)), []
        for seed in range(STEPS):
            state, metrics = step(state, batch(seed))
            found.append(float(metrics.loss))
        sums = step.measure(state.params, batch(9), state.model_state)
    tolerance = TOLERANCE.get(library, 1e-9)
    np.testing.assert_allclose(found, losses, rtol=tolerance)
    assert float(sums.total / sums.weight) == pytest.approx(float(evaluated), rel=tolerance)
    hits, weight = sums.metrics["accuracy"]
    assert float(hits / weight) == pytest.approx(right, rel=1e-9)


OWN = """
import jax
from flax import nnx

def squares(outputs, batch):
    return ((outputs - batch["targets"][:, None]) ** 2).sum(axis=1)

def halved(batch):
    return batch["inputs"] / 2

class Net(nnx.Module):
    def __init__(self, rngs, width=2):
        self.only = nnx.Linear(64, width, rngs=rngs)

    def __call__(self, x):
        return self.only(x)

def pair():
    return lambda key: {"w": key}, lambda params, batch, key: (0.0, 1.0)
"""


@pytest.mark.long_cases("keras_mlp")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The model does not pass JAX's checks")
@pytest.mark.parametrize("name", ["linen_cnn", "nnx_mlp", "equinox_mlp", "keras_mlp"])
def test_examples_train(name, tmp_path):
    """Each from a YAML of a few lines, under FSDP; it learns, its accuracy is logged, and its library has it back."""
    if name == "keras_mlp":
        unnamed_layers_count_from_one()
    file = EXAMPLES / f"{name}.yaml"
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 20
    steps = ["train.steps=30", "run.log_every=5", "checkpoint.every=20"]
    config = load_config(file, [f"run.dir={tmp_path}", *steps])
    assert config.strategy["fsdp"].size == 8
    assert train(config) == 0
    records = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert records[-1]["loss"] < 0.8 * records[0]["loss"]
    assert records[-1]["accuracy"] > records[0]["accuracy"]
    assert 0 <= records[-1]["eval_accuracy"] <= 1
    if name == "keras_mlp":
        unnamed_layers_count_from_one()
    run, inputs = load_run(tmp_path), np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    expected = run.predict({"inputs": inputs})
    run.export(tmp_path / "model.safetensors")
    found = np.asarray(in_its_own_library(name, tmp_path / "model.safetensors", inputs))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


def in_its_own_library(name, file, inputs):
    """What a module computes with exported arrays, loaded as the documentation tells: with nothing of spmdkit."""
    page = (EXAMPLES.parent / "docs" / "other-libraries.md").read_text(encoding="utf-8")
    told = {"np": np}
    for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        if "def in_" in text:
            exec(text, told)
    module = example(name)
    if name == "linen_cnn":
        return told["in_linen"](module.CNN(width=16), file, inputs)
    if name == "nnx_mlp":
        return told["in_nnx"](module.MLP(told["nnx"].Rngs(7), width=64), file, inputs)
    if name == "equinox_mlp":
        return told["in_equinox"](*module.make(jax.random.key(7), width=64), file, inputs)
    unnamed_layers_count_from_one()
    return told["in_keras"](module.make(width=64), file, inputs)


def unnamed_layers_count_from_one():
    """As in a fresh process."""
    keras_in("float32").utils.clear_session()


@pytest.fixture
def own(tmp_path):
    (tmp_path / "of_mine.py").write_text(OWN, encoding="utf-8")

    def load(**spec):
        example = {"inputs": jax.numpy.ones((1, 64)), "targets": jax.numpy.ones(1)}
        return load_model({"name": "of_mine:Net", **spec}, search_path=[tmp_path], example=lambda: example)

    yield load
    __import__("sys").modules.pop("of_mine", None)


@pytest.mark.slow
def test_options_and_functions_of_ones_own(own):
    model = own(width=3, loss="of_mine:squares", metrics={"far": "of_mine:squares"}, inputs="of_mine:halved")
    params = model.init(jax.random.key(0))
    assert params["only"]["kernel"].shape == (64, 3)
    rows = {"inputs": jax.numpy.ones((4, 64)), "targets": jax.numpy.zeros(4), "example": jax.numpy.arange(4)}
    total, weight, metrics, _ = model.loss(params, rows, None)
    expected = ((0.5 * params["only"]["kernel"].sum(0)) ** 2).sum() * 4
    assert (float(total), float(weight)) == (pytest.approx(float(expected), rel=1e-5), 4.0)
    assert float(metrics["far"][0]) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"loss": "softmax"}, "model.loss='softmax' is not a valid loss. Choose from softmax_cross_entropy, sigmoid"),
        ({"loss": "of_mine:square"}, "model.loss='of_mine:square'.*does not define square. Did you mean squares"),
        ({"loss": "squared_error", "metrics": ["accurate"]}, "model.metrics.accurate='accurate' is not a valid loss"),
        ({"loss": "squared_error", "metrics": 3}, "model.metrics=3 must be a name or a list of names"),
        ({"loss": "squared_error", "inputs": 3}, "model.inputs=3 must be a name or a list of names"),
        ({"loss": "squared_error", "metrics": [["a"]]}, r"model.metrics.*=\['a'\] is not a valid loss"),
        ({"loss": ["a"]}, r"model.loss=\['a'\] is not a valid loss"),
        (
            {"name": "of_mine:pair", "loss": "squared_error"},
            "model.loss is only for a module of Flax, Equinox or Keras",
        ),
    ],
)
def test_rejects_unknown_functions(own, spec, told):
    with pytest.raises(UserError, match=told):
        own(**spec)
