"""A module of another library by a config alone."""

import importlib.util
import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from spmdkit.configs import load_config
from spmdkit.launch.finished.load import load_run
from spmdkit.launch.run.train import train
from spmdkit.mesh.errors import UserError
from spmdkit.models.catalog import load_model
from spmdkit.training.metrics import read_metrics

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
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


@pytest.fixture(autouse=True)
def other_libraries_broadcast():
    with jax.numpy_rank_promotion("allow"):
        yield


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
    spec = importlib.util.spec_from_file_location(f"own_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    if name == "linen_cnn":
        return told["in_linen"](example.CNN(width=16), file, inputs)
    if name == "nnx_mlp":
        return told["in_nnx"](example.MLP(told["nnx"].Rngs(7), width=64), file, inputs)
    if name == "equinox_mlp":
        return told["in_equinox"](*example.make(jax.random.key(7), width=64), file, inputs)
    unnamed_layers_count_from_one()
    return told["in_keras"](example.make(width=64), file, inputs)


def unnamed_layers_count_from_one():
    """As in a fresh process."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    keras.utils.clear_session()


@pytest.fixture
def own(tmp_path):
    (tmp_path / "of_mine.py").write_text(OWN, encoding="utf-8")

    def load(**spec):
        example = {"inputs": jax.numpy.ones((1, 64)), "targets": jax.numpy.ones(1)}
        return load_model({"name": "of_mine:Net", **spec}, search_path=[tmp_path], example=lambda: example)

    yield load
    __import__("sys").modules.pop("of_mine", None)


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
        ({"loss": "softmax"}, "model.loss='softmax' is no loss. Choose from softmax_cross_entropy, sigmoid"),
        ({"loss": "of_mine:square"}, "model.loss='of_mine:square'.*holds no square. Did you mean squares"),
        ({"loss": "squared_error", "metrics": ["accurate"]}, "model.metrics.accurate='accurate' is no loss"),
        ({"loss": "squared_error", "metrics": "accuracy"}, r"must be a list of names, such as \[accuracy\], or a"),
        ({"loss": "squared_error", "metrics": 3}, "model.metrics=3 must be a list of names"),
        ({"loss": "squared_error", "inputs": 3}, "model.inputs=3 must be the name of an array of the data, or module:"),
        ({"name": "of_mine:pair", "loss": "squared_error"}, "model.loss is for a module of Flax, Equinox or Keras"),
    ],
)
def test_what_is_not_there_is_named(own, spec, told):
    with pytest.raises(UserError, match=told):
        own(**spec)


def test_a_module_without_a_loss():
    from flax import linen
    from spmdkit.models.adapters.configured import adapt_configured

    with pytest.raises(UserError, match=r"model\.loss says what judges its outputs"):
        adapt_configured(linen.Dense(3), "mine:Net", {}, (), dict)
