"""The operations of a run's own model, counted in its traced loss: as many as a hand counts, in every library."""

import sys
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.configs import load_config
from spmdkit.data import bucket_by_length, from_arrays, from_dataset
from spmdkit.launch.cli import main
from spmdkit.models.adapters.library_model import adapt
from spmdkit.parallel import Model
from spmdkit.runtime.build_run import build
from spmdkit.runtime.model_flops import with_counted_flops
from spmdkit.runtime.run_context import FlopsOfSteps
from spmdkit.training.metrics import read_metrics
from support.runs import write_config

FEATURES, HIDDEN, CLASSES = 8, 16, 4
PER_ROW = 4 * FEATURES * HIDDEN + 6 * HIDDEN * CLASSES
"""2 forward, and 2 for each gradient: the first layer has none of its inputs."""


def own_functions(example):
    def init(key):
        return {"first": jnp.ones((FEATURES, HIDDEN)), "second": jnp.ones((HIDDEN, CLASSES))}

    def loss(params, batch, key):
        outputs = jnp.tanh(batch["inputs"] @ params["first"]) @ params["second"]
        chosen = jax.nn.one_hot(batch["targets"], CLASSES) * outputs
        return jnp.sum(chosen.sum(1) * batch["weights"]), jnp.sum(batch["weights"])

    return Model(init=init, loss=loss)


def of_nnx(example):
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
            self.norm = nnx.BatchNorm(HIDDEN, rngs=rngs)
            self.second = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

        def __call__(self, x):
            return self.second(nnx.relu(self.norm(self.first(x))))

    return adapt(Net, loss="softmax_cross_entropy", metrics={"accuracy": "accuracy"}, example=example)


def of_linen(example):
    nn = pytest.importorskip("flax.linen")
    net = nn.Sequential([nn.Dense(HIDDEN), nn.BatchNorm(use_running_average=False), nn.relu, nn.Dense(CLASSES)])
    return adapt(net, loss="softmax_cross_entropy", example=example)


def of_equinox(example):
    eqx = pytest.importorskip("equinox")
    net = eqx.nn.MLP(FEATURES, CLASSES, HIDDEN, 1, key=jax.random.key(0))
    return adapt(net, loss="softmax_cross_entropy", example=example)


def of_keras(example):
    keras = pytest.importorskip("keras")
    layers = [keras.layers.Dense(HIDDEN, "relu"), keras.layers.Dropout(0.1), keras.layers.Dense(CLASSES)]
    return adapt(keras.Sequential(layers), loss="softmax_cross_entropy", example=example)


pytestmark = pytest.mark.usefixtures("broadcasting")
MAKERS = [own_functions, of_nnx, of_linen, of_equinox, of_keras]


def own_run(tmp_path, monkeypatch, make, *overrides, splits=None):
    """A run of a model that a module of the user makes."""
    rows = {
        "inputs": np.ones((64, FEATURES), np.float32),
        "targets": np.zeros(64, np.int32),
        "weights": np.ones(64, np.float32),
    }
    module = ModuleType("counted_model")
    module.model = lambda: make({name: array[:1] for name, array in rows.items()})
    monkeypatch.setitem(sys.modules, "counted_model", module)
    path = write_config(tmp_path, model={"name": "counted_model:model", "check": "off"})
    return build(load_config(path, overrides), splits=splits or from_arrays(rows))


@pytest.mark.parametrize("make", MAKERS)
def test_every_library_has_the_operations_of_its_layers(make, tmp_path, monkeypatch):
    built = own_run(tmp_path, monkeypatch, make)
    assert built.model.flops_per_row is None
    assert with_counted_flops(built).flops_per_row == PER_ROW


@pytest.mark.parametrize("overrides", [("strategy={data: 8}", "train.accumulate=2"), ("strategy={fsdp: 8}",)])
def test_operations_of_a_row_do_not_depend_on_the_mesh(overrides, tmp_path, monkeypatch):
    built = own_run(tmp_path, monkeypatch, own_functions, *overrides)
    assert with_counted_flops(built).flops_per_row == PER_ROW


@pytest.mark.parametrize("make", [of_nnx, of_linen])
def test_statistics_over_all_devices_are_no_products(make, tmp_path, monkeypatch):
    built = own_run(tmp_path, monkeypatch, make, "strategy={data: 8}")
    assert with_counted_flops(built).flops_per_row == PER_ROW


def test_loss_that_needs_its_mesh_is_counted_on_it(tmp_path, monkeypatch):
    """Rows are compared with those of the 8 devices, by the name of their axis."""

    def needs_mesh(example):
        def loss(params, batch, key):
            mine = batch["inputs"] @ params["first"]
            scores = mine @ jax.lax.all_gather(mine, "data", tiled=True).T
            return jnp.sum(scores.mean(1) * batch["weights"]), jnp.sum(batch["weights"])

        return Model(init=own_functions(example).init, loss=loss)

    built = own_run(tmp_path, monkeypatch, needs_mesh, "strategy={data: 8}")
    per_row = 4 * FEATURES * HIDDEN + 6 * HIDDEN * built.config.train.global_batch
    assert with_counted_flops(built).flops_per_row == per_row


def test_frozen_parameters_have_no_gradient(tmp_path, monkeypatch):
    built = own_run(tmp_path, monkeypatch, own_functions, "optimizer.freeze=[first]")
    assert with_counted_flops(built).flops_per_row == 2 * FEATURES * HIDDEN + 4 * HIDDEN * CLASSES


def test_stated_operations_are_not_counted(tmp_path, monkeypatch):
    def states(example):
        model = own_functions(example)
        return Model(init=model.init, loss=model.loss, flops_per_row=5.0)

    built = own_run(tmp_path, monkeypatch, states)
    assert with_counted_flops(built) is built.model


def test_operations_that_cannot_be_counted_are_unknown(tmp_path, monkeypatch):
    def searches(example):
        model = own_functions(example)

        def loss(params, batch, key):
            square = jax.lax.stop_gradient(params["second"]) @ jax.lax.stop_gradient(params["second"]).T
            jax.lax.while_loop(lambda x: jnp.sum(x) < 1, lambda x: x @ square, square)
            found = jax.lax.while_loop(lambda x: jnp.sum(x) < 1, lambda x: x @ square, square)
            total, weight = model.loss(params, batch, key)
            return total + 0 * jnp.sum(found), weight

        return Model(init=model.init, loss=loss)

    built = own_run(tmp_path, monkeypatch, searches)
    assert with_counted_flops(built).flops_per_row is None


def test_batches_of_several_lengths_count_as_long_as_they_are(tmp_path, monkeypatch):
    """Rows of 8 and of 32 numbers, times a matrix of 16: twice 2 operations for each position, forward and backward."""

    def sequence(example):
        def loss(params, batch, key):
            outputs = batch["inputs"].astype(jnp.float32)[..., None] @ params["matrix"]
            return jnp.sum(outputs.mean(-1) * batch["weights"]), jnp.sum(batch["weights"])

        return Model(init=lambda key: {"matrix": jnp.ones((1, HIDDEN))}, loss=loss)

    sizes = [8] * 48 + [32] * 16
    splits = bucket_by_length(from_dataset([(np.arange(size),) * 2 for size in sizes]), lengths=[8, 32])
    model = with_counted_flops(own_run(tmp_path, monkeypatch, sequence, splits=splits))
    assert [model.flops_of_length(length) for length in (8, 32)] == [4 * 8 * HIDDEN, 4 * 32 * HIDDEN]
    assert model.flops_per_row == 4 * 32 * HIDDEN
    flops = FlopsOfSteps(model, splits.train, 4)
    assert flops(0, 4) == pytest.approx(4 * (3 * 4 * 8 + 4 * 32) * HIDDEN / 4)


@pytest.mark.slow
def test_metrics_of_an_own_model_have_its_operations(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "linear_model.py").write_text(
        "import jax.numpy as jnp\n"
        "def init(key):\n"
        "    return {'w': jnp.zeros((64, 10))}\n"
        "def loss(params, batch, key):\n"
        "    outputs = batch['inputs'] @ params['w']\n"
        "    return ((outputs.mean(1)) ** 2 * batch['weights']).sum(), batch['weights'].sum()\n"
        "model = (init, loss)\n"
    )
    config = write_config(tmp_path, model={"name": "linear_model:model", "check": "off"}, run={"log_every": 1})
    assert main(["train", str(config)]) == 0
    for record in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert record["flops_per_second"] * record["seconds"] == pytest.approx(4 * 64 * 10 * 16)
