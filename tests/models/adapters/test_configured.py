"""A module of another library by a config alone."""

from pathlib import Path

import jax
import pytest
from spmdkit.configs import load_config
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
    """Each from a YAML of a few lines, under FSDP; it learns, and its accuracy is logged."""
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
