"""The user's own model is checked when a run is built: nothing of a run exists before it has passed."""

import gc
import re
import sys

import jax
import pytest
from spmdkit.configs import load_config
from spmdkit.parallel.sharding.model_errors import ModelError
from spmdkit.parallel.verification.contract import probe
from spmdkit.runtime import model_check
from spmdkit.runtime import verify as verify_file
from spmdkit.runtime.build_run import build
from support.runs import write_config

OWN = """
import jax
import jax.numpy as jnp
import optax
from jax import lax
from spmdkit.data import from_arrays

def make(kind="right", classes=10):
    def init(key):
        return {"w": jax.random.normal(key, (64, classes)) * 0.1}

    def loss(params, batch, key):
        logits = jnp.sin(batch["inputs"] @ params["w"])
        if kind == "coupled":
            logits = logits - logits.mean(0, keepdims=True)
        if kind == "over the mesh":
            logits = logits - lax.pmean(logits.mean(0, keepdims=True), "data")
        if kind == "over no mesh":
            logits = logits - lax.pmean(logits, "nowhere")
        if kind == "eight rows":
            logits = logits.reshape(2, 4, 2, classes).reshape(logits.shape)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        if kind == "evaluated":
            return (each * batch["weights"]).sum() * jax.random.uniform(key), batch["weights"].sum()
        return (each * batch["weights"]).sum(), batch["weights"].sum()

    if kind == "raises":
        raise RuntimeError("no model today")
    return init, loss

def transformation(learning_rate):
    return optax.sgd(learning_rate * None)

def data(config):
    return from_arrays({"inputs": [[0.0], [1.0]], "targets": [1]})
"""
"""The line of each mistake is looked up, as in an editor."""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Makes the config of a run of the model above, changed by overrides."""
    (tmp_path / "own.py").write_text(OWN)
    path = write_config(tmp_path, model={"name": "own:make"}, strategy={"data": 2}, run={"simulate": 2, "log_every": 1})

    def make(*overrides):
        return load_config(path, ["run.simulate=0", "strategy={data: 8}", *overrides])

    make.path = path
    yield make
    sys.modules.pop("own", None)


def line_of(text):
    return next(number for number, line in enumerate(OWN.splitlines(), 1) if text in line)


@pytest.mark.slow
def test_a_right_model_is_built_and_leaves_nothing(config):
    gc.collect()  # what other tests have left
    before = len(jax.live_arrays())
    quick = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        build(config())
        assert jax.config.read("jax_disable_most_optimizations") is False
    finally:
        jax.config.update("jax_disable_most_optimizations", quick)
    gc.collect()
    assert len(jax.live_arrays()) == before


def test_command_line_prints_one_message(config, tmp_path, cli):
    error = cli(2, "train", config.path, "run.simulate=0", "strategy={data: 8}", "model.kind=coupled").err
    assert error.startswith("error: model.name='own:make' breaks the contract (rows): ")
    assert not (tmp_path / "run").exists()


def test_skips_models_of_the_catalog(tmp_path, monkeypatch):
    monkeypatch.setattr(model_check, "breaches", None)
    build(load_config(write_config(tmp_path)))


def test_verification_skips_the_contract_check(config, monkeypatch):
    """It compares a model that couples rows, and says what it finds."""
    given = []
    monkeypatch.setattr(verify_file, "reduce_config", lambda config, *rest: given.append(config) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        verify_file.verify_config(config())
    assert given[0].model["check"] == "off"


def test_functions_that_raise(config, tmp_path):
    place = f"in {tmp_path}/own.py, line"
    with pytest.raises(ValueError) as error:
        build(config("model.kind=raises"))
    line = line_of("no model today")
    text = 'raise RuntimeError("no model today")'
    assert str(error.value) == f"model.name='own:make' fails {place} {line} ({text}): RuntimeError: no model today"
    with pytest.raises(ValueError) as error:
        build(config("optimizer={name: 'own:transformation'}"))
    line = line_of("learning_rate * None")
    assert str(error.value).startswith(f"optimizer.name='own:transformation' fails {place} {line} (return optax.sgd(")
    with pytest.raises(ValueError) as error:
        build(config("data={source: 'own:data'}"))
    line = line_of("return from_arrays")
    assert str(error.value).startswith(f"data.source='own:data' fails {place} {line} (return from_arrays(")
    assert str(error.value).endswith("one row per example on dim 0; these have {'inputs': 2, 'targets': 1}.")


def test_a_loss_that_cannot_be_evaluated(config):
    with pytest.raises(ModelError, match="loss without a key, as in evaluation, fails in"):
        build(config("model.kind=evaluated"))
    build(config("model.kind=evaluated", "data.eval_fraction=0", "model.check=off"))


def test_a_model_with_collectives_of_its_own_is_traced_on_the_mesh(config, tmp_path, monkeypatch):
    """Synchronised statistics are right on a mesh, and cannot run on one device."""
    monkeypatch.setattr(model_check, "breaches", None)
    build(config("model.kind='over the mesh'"))
    place = f"on the mesh, loss fails in {tmp_path}/own.py, line {line_of('nowhere')} (logits = logits - lax.pmean("
    with pytest.raises(ModelError, match=re.escape(place)):
        build(config("model.kind='over no mesh'"))


def test_warns_if_model_rejects_sample_rows(config):
    with pytest.warns(UserWarning, match="contract is not checked: on 4 rows, and on 2, of one device it raises Type"):
        build(config("model.kind='eight rows'", "train.global_batch=128"))


def test_warns_if_model_is_too_large_to_check(config, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(model_check, "MAX_BYTES", 2559)
        with pytest.warns(UserWarning, match=r"are 2.5 KiB, more than 2.5 KiB.*`spmdkit verify` compares"):
            build(config("model.kind=coupled"))
    monkeypatch.setattr(probe, "MAX_TEMPORARY_BYTES", 0)
    with pytest.warns(UserWarning, match=r"contract is not checked: 4 rows on one device need 0.0 GiB"):
        build(config("model.kind=coupled"))
    build(config("model.kind=coupled", "model.check=off"))
