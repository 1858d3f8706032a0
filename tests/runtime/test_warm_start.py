"""`checkpoint.start_from`: a run begins with exactly the parameters of another, whatever mesh wrote them.

Parameters are compared as TensorStore's own reader gives them, through `spmdkit export` to NumPy files.
"""

import json
import re
import shutil
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from spmdkit.checkpoints.manager import Checkpoints
from spmdkit.configs import load_config
from spmdkit.configs.schema import CheckpointConfig
from spmdkit.launch.cli import main
from spmdkit.parallel.step.model_order import abstract_in_model_order
from spmdkit.runtime import warm_start
from spmdkit.runtime.build_run import build
from support import toy
from support.faults import damage
from support.runs import assert_same_arrays, losses, metrics, train, write_config, write_language_config

pytestmark = pytest.mark.slow_except(
    "test_initialized_parameters_are_those_of_the_seed",
    "test_takes_the_blocks_of_a_pipeline_that_python_saved",
    "test_floating_dtypes_may_differ",
)
MODEL = {"name": "transformer", "layers": 5, "width": 16, "heads": 2, "mlp_width": 32}
WIDER = {**MODEL, "mlp_width": 48}
STILL = {"name": "sgd", "learning_rate": 1e-30}
"""Steps that change no parameter."""


def params(folder, tmp_path, name):
    """The parameters of a run's newest checkpoint by path, in the model's order of blocks."""
    path = tmp_path / f"{name}-exported"
    assert main(["export", str(folder), str(path), "--lora", "separate"]) == 0
    return {each.relative_to(path).with_suffix("").as_posix(): np.load(each) for each in path.rglob("*.npy")}


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """A language model of 5 blocks, trained by 2 stages: blocks lie in another order than the model's."""
    strategy = {"pipe": {"size": 2, "schedule": "interleaved_1f1b", "microbatches": 2}, "data": 4}
    short = {"train": {"steps": 3, "global_batch": 16}, "eval": {"every": 0, "batches": 1}}
    config = write_language_config(tmp_path_factory.mktemp("old"), model=MODEL, strategy=strategy, **short)
    train(config)
    return config


def new_config(old, folder, **sections):
    """The config of another run over the same files, that begins with the parameters of the first."""
    shutil.copytree(old.parent / "corpus", folder / "corpus")
    base = {
        "data": {"source": "text", "files": [str(folder / "corpus" / "*.txt")], "length": 16, "eval_fraction": 0.3},
        "model": MODEL,
        "strategy": {"fsdp": {"size": 4, "floor_bytes": 64}, "data": 2},
        "train": {"steps": 1, "global_batch": 16},
        "eval": {"every": 0, "batches": 1},
        "optimizer": STILL,
        "checkpoint": {"every": 0, "start_from": str(old.parent / "run")},
    }
    return write_config(folder, **{**base, **sections})


@pytest.mark.long
def test_another_mesh_dtype_batch_and_optimizer_begin_with_the_same_parameters(old, tmp_path, capsys, cli):
    config = new_config(old, tmp_path, train={"steps": 1, "global_batch": 8})
    assert f"Starting from the parameters of {old.parent}/run/checkpoints/3 (" in cli(0, "train", config).out
    expected = params(old.parent / "run", tmp_path, "old")
    assert_same_arrays(params(tmp_path / "run", tmp_path, "new"), expected)
    train(config, "train.steps=2", f"checkpoint.start_from={tmp_path}/nowhere")
    assert "Resuming" in capsys.readouterr().out, "a run that goes on takes nothing from there any more"


def test_the_optimizer_is_fresh_and_the_data_begins(old, tmp_path):
    config = new_config(old, tmp_path, optimizer={"learning_rate": 0.01})
    train(config)
    (record,) = metrics(tmp_path / "run")
    assert (record["step"], record["learning_rate"]) == (1, 0.01)
    assert record["loss"] < losses(old.parent / "run")[1], "it has learned already"


def test_floating_dtypes_may_differ(untrained):
    built = build(load_config(untrained, ["precision.params=bfloat16"]))
    checkpoint = CheckpointConfig(start_from=str(untrained.parent / "run"))
    abstract = built.step.abstract_state().params
    start = warm_start.WarmStart(checkpoint, built.model, abstract, seed=0, seconds=1.0)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(abstract)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(start.params())} == {"float32"}


def test_initialized_parameters_are_those_of_the_seed(untrained):
    step = (built := build(load_config(untrained))).step
    checkpoint = CheckpointConfig(start_from=str(untrained.parent / "run"), start_fresh=("layers/0/kernel",))
    abstract = step.abstract_state().params
    start = warm_start.WarmStart(checkpoint, built.model, abstract, seed=7, seconds=1.0)
    found, drawn = (np.asarray(params["layers"][0]["kernel"]) for params in (start.params(), step.init(7).params))
    np.testing.assert_array_equal(found, drawn)
    assert start.initializes, "processes compare the program of init"
    whole = warm_start.WarmStart(replace(checkpoint, start_fresh=()), built.model, abstract, seed=7, seconds=1.0)
    assert not whole.initializes


def test_takes_the_blocks_of_a_pipeline_that_python_saved(tmp_path):
    """They are in the model's order there, and each goes to its own stage of another pipeline."""
    own = replace(toy.BLOCK_MODEL, init=numbered, num_blocks=4)
    pipe = {"size": 2, "schedule": "zbv", "microbatches": 2}
    interleaved = {**pipe, "schedule": "interleaved_1f1b", "virtual": 2}
    old, new = (toy.build({"pipe": options}, model=own) for options in (pipe, interleaved))
    with Checkpoints(tmp_path, keep=1, abstract_state=old.abstract_state()) as checkpoints:
        checkpoints.save(4, old.init(0))
    abstract = abstract_in_model_order(new.abstract_state()).params
    start = warm_start.WarmStart(CheckpointConfig(start_from=str(tmp_path)), own, abstract, seed=7, seconds=1.0)
    params = start.params()
    assert np.asarray(params["blocks"]["up"]).tolist() == [0, 1, 2, 3]
    assert np.asarray(new.init(0, params).params["blocks"]["up"]).tolist() == [0, 2, 1, 3]


def numbered(key):
    """Each block is its number."""
    return {"embed": jnp.ones(1), "blocks": {"up": jnp.arange(4.0)}, "head": jnp.ones(1)}


@pytest.mark.long
def test_other_shapes_are_named_or_drawn(old, tmp_path, cli):
    config = new_config(old, tmp_path, model=WIDER)
    error = cli(2, "train", config).err
    assert "checkpoint.start_from: the parameters of " in error
    assert "blocks/mlp/up: float32[5, 16, 32] in the checkpoint, float32[5, 16, 48] in this run" in error
    assert "checkpoint.start_fresh" in error
    assert not (tmp_path / "run").exists()
    fresh = ["run.seed=7", "checkpoint.start_fresh=['blocks/mlp/.*']"]
    assert "; initialized: blocks/mlp/" in cli(0, "train", config, *fresh).out
    expected, found = params(old.parent / "run", tmp_path, "old"), params(tmp_path / "run", tmp_path, "new")
    kept = {path: array for path, array in expected.items() if "/mlp/" not in path}
    assert_same_arrays({path: found[path] for path in kept}, kept)
    drawn_config = new_config(old, tmp_path / "drawn", checkpoint={"every": 0}, model=WIDER)
    train(drawn_config, "run.seed=7")
    drawn = params(tmp_path / "drawn" / "run", tmp_path, "drawn")
    assert np.array_equal(found["blocks/mlp/up"], drawn["blocks/mlp/up"]), "as a run of the same seed draws it"


@pytest.mark.long
def test_adapters_begin_beside_parameters_that_are_taken_over(old, tmp_path, capsys, cli):
    lora = {"rank": 2, "match": ["blocks/attention/.*"]}
    config = new_config(old, tmp_path, model={**MODEL, "lora": lora}, optimizer={"learning_rate": 0.01})
    assert "; initialized: blocks/lora/attention/" in cli(0, "train", config).out
    expected, found = params(old.parent / "run", tmp_path, "old"), params(tmp_path / "run", tmp_path, "new")
    assert_same_arrays({path: array for path, array in found.items() if "lora" not in path.split("/")}, expected)
    again = tmp_path / "again"
    again.mkdir()
    start = {"every": 0, "start_from": str(tmp_path / "run")}
    config = new_config(old, again, model={**MODEL, "lora": lora}, checkpoint=start)
    train(config)
    assert_same_arrays(params(again / "run", tmp_path, "again"), found)
    train(config, "--fresh", f"model={json.dumps(MODEL)}", code=2)
    assert "it has low-rank adapters: keep its model.lora" in capsys.readouterr().err


def change_a_number(checkpoint):
    """Writes another number as Orbax would: every file can be parsed."""
    base = {"driver": "file", "path": f"{checkpoint}/state/"}
    kvstore = {"driver": "ocdbt", "base": base, "path": "params/blocks/mlp/up/"}
    store = tensorstore.open({"driver": "zarr", "kvstore": kvstore}, open=True).result()
    store[2, 1, 3].write(7.0).result()


HARMS = [(change_a_number, "contains other bytes than were saved"), (partial(damage, how="flip"), "is damaged: ")]


@pytest.mark.parametrize(("harm", "text"), HARMS)
def test_damage_is_found_before_anything_is_trained(harm, text, old, tmp_path, cli):
    damaged = tmp_path / "damaged"
    shutil.copytree(old.parent / "run", damaged)
    harm(damaged / "checkpoints" / "3")
    error = cli(2, "train", new_config(old, tmp_path / "new"), f"checkpoint.start_from={damaged}").err
    assert error.startswith("error: checkpoint.start_from: The checkpoint ")
    assert text in error
    assert "Give another of its steps, as <run>/<step>." in error
    assert not (tmp_path / "new" / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["checkpoint.start_from=nowhere"], "There is no "),
        (["checkpoint.start_fresh=['heads/.*']"], "checkpoint.start_fresh: 'heads/.*' matches no parameter."),
        (["checkpoint.start_fresh=['(']"], "checkpoint.start_fresh: '(' is not a valid regular expression"),
        (["checkpoint.start_from=''", "checkpoint.start_fresh=[head]"], "Set checkpoint.start_from to the directory"),
    ],
)
def test_mistakes(overrides, text, old, tmp_path, cli):
    assert text in cli(2, "train", new_config(old, tmp_path), *overrides).err
    assert not (tmp_path / "run").exists()


def test_processes_compare_the_checkpoint_and_its_contents(old, tmp_path, monkeypatch):
    """A run that still trains saves step 6 between the looks of two processes; or another folder has that name."""
    seen = []
    monkeypatch.setattr(warm_start, "agree", lambda name, found, seconds, fix: seen.append((found, fix)))
    train(new_config(old, tmp_path), "train.steps=1")
    ((found, fix),) = seen
    assert fix.startswith("Name one of its steps, as <run>/<step>, by an absolute path")
    ((name, value),) = found.items()
    assert name == "the step of checkpoint.start_from"
    assert re.fullmatch(r"3 \(checksums [0-9a-f]{12}\)", value)
