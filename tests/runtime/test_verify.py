"""`spmdkit verify`: exit codes, what it prints, what it reduces, and that a planted mistake comes out."""

import json
from dataclasses import replace
from math import gcd

import jax
import numpy as np
import pytest
from spmdkit.checkpoints.manager import Checkpoints
from spmdkit.configs import load_config
from spmdkit.configs.checks import axis_sizes
from spmdkit.data import open_splits
from spmdkit.launch.cli import main
from spmdkit.parallel.step import composition
from spmdkit.parallel.verification.compare import FLOAT64
from spmdkit.runtime import verify as verify_file
from spmdkit.runtime.reduce import MAX_CLIP_NORM, reduce_config, shrink
from spmdkit.runtime.verify import ragged_batch, simulate_devices
from support.runs import write_config, write_language_config

pytestmark = pytest.mark.slow_except(
    "test_what_cannot_work_is_exit_code_2",
    "test_shrinking_keeps_what_divides",
    "test_a_large_transformer_becomes_small",
    "test_sizes_at_which_the_optimizer_does_the_same",
    "test_token_ids_are_folded_into_a_smaller_vocabulary",
    "test_weights_are_ragged_and_no_row_is_without",
    "test_devices_are_those_that_the_strategy_needs",
    "test_compares_as_the_run_trains",
    "test_compares_on_the_devices_that_the_config_simulates",
)

DEVICES = [f"cpu:{number}" for number in range(8)]
CLIPPED = {"train.clip_norm": {"from": 1.0, "to": 0.001}}


def verify(path, *options, capsys):
    """Exit code and JSON of a verification in this process."""
    code = main(["verify", str(path), *options, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_equal(tmp_path, capsys):
    code, result = verify(write_config(tmp_path), capsys=capsys)
    assert (code, result["ok"], result["first_difference"]) == (0, True, None)
    assert {axis: size for axis, size in result["mesh"].items() if size > 1} == {"data": 2, "fsdp": 4}
    assert max(result[key] for key in ("loss_rel", "grad_max_rel", "grad_norm_rel", "params_rel")) < 1e-9
    assert result["worst_leaf"] in result["gradients"]
    assert result["collectives"]["equal"]
    assert "a checkpoint in files restored onto fsdp 8 and back" in result["proved"]
    assert "the config's own sizes" in result["not_looked_at"]
    assert "checkpoint files" not in result["not_looked_at"]
    sizes = {"train.global_batch": {"from": 16, "to": 8}, "model.widths": {"from": [32], "to": [16]}}
    assert result["reduced"] == {**sizes, **CLIPPED}
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_as_tables_at_full_size(tmp_path, cli):
    text = cli(0, "verify", write_config(tmp_path), "--full", "--float32", "--steps", "1").out
    assert "data=2, fsdp=4: 8 devices against one, in float32" in text
    assert "reduced size" not in text
    assert "parameters after 1 step" in text
    *_, verdict, _, last = text.rstrip("\n").split("\n")
    assert verdict == "The same as on one device."
    assert last.startswith("proved: the model's contract, initial parameters, loss, weight, gradients, gradient norm, ")
    assert "a batch of weight 0.5, parameters" in last
    assert "; not looked at: the code of the model and the optimizer (both sides run it), " in last
    assert "the config's own sizes" not in last
    assert last.endswith("other dtypes than float32")


def test_a_checkpoint_that_comes_back_otherwise(tmp_path, capsys, monkeypatch):
    """The rows of one array in another order: as blocks that were stored stage by stage."""
    right = Checkpoints.restore

    def wrong(checkpoints, step=None):
        state = right(checkpoints, step)
        first = state.params["layers"][0]
        first["kernel"] = jax.device_put(np.roll(np.asarray(first["kernel"]), 1, axis=0), first["kernel"].sharding)
        return state

    monkeypatch.setattr(Checkpoints, "restore", wrong)
    code, result = verify(write_config(tmp_path), capsys=capsys)
    assert (code, result["first_difference"]["what"]) == (1, "checkpoint")
    assert result["first_difference"]["where"] == "params/layers/0/kernel"
    assert "restored onto fsdp 8, has the same rows of dim 0 in another order" in result["first_difference"]["hint"]
    assert result["proved"] == []


def test_clipping_is_at_work_at_the_reduced_size(tmp_path, capsys, monkeypatch):
    """A norm under train.clip_norm would hide how gradients are clipped."""
    right = composition.clip_factor
    monkeypatch.setattr(composition, "clip_factor", lambda norm, clip_norm: right(norm / 2, clip_norm))
    train = {"steps": 12, "global_batch": 16, "clip_norm": 1000.0}
    code, result = verify(write_config(tmp_path, train=train), capsys=capsys)
    assert (code, result["reduced"]["train.clip_norm"]) == (1, {"from": 1000.0, "to": 0.001})
    assert "2 times the reference in every element" in result["first_difference"]["hint"]


@pytest.mark.long
def test_what_cpu_devices_do_another_way_is_said(tmp_path, capsys):
    strategy = {"pipe": {"size": 2, "microbatches": 2}, "context": 2, "data": 2}
    code, result = verify(write_language_config(tmp_path, strategy=strategy), capsys=capsys)
    assert (code, result["ok"]) == (0, True)
    [note] = result["notes"]
    assert "strategy.context.attention=ring sends by all-to-all in the ring's group" in note
    assert "the GPU code that replaces the code in the note" in result["not_looked_at"]


UNEVEN = ["model.widths=[31]", "layouts.rules={layers/0/kernel: [null, fsdp]}"]


@pytest.mark.parametrize("given", [["train.global_batch=9"], ["--steps", "0"], UNEVEN])
def test_what_cannot_work_is_exit_code_2(given, tmp_path, cli):
    assert cli(2, "verify", write_config(tmp_path), *given).err.startswith("error: ")


# What is reduced


@pytest.mark.parametrize("modulus", [1, 2, 6, 8, 48])
@pytest.mark.parametrize("number", [1, 5, 30, 96, 128, 1000])
def test_shrinking_keeps_what_divides(number, modulus):
    small = shrink(number, modulus, 16)
    assert min(number, 16) <= small <= number
    assert gcd(small, modulus) == gcd(number, modulus)


@pytest.mark.usefixtures("float64")
def test_a_large_transformer_becomes_small(tmp_path):
    model = {"name": "transformer", "layers": 32, "width": 1024, "heads": 32, "kv_heads": 8, "tied": True}
    strategy = {"fsdp": {"size": 4}, "data": 2}
    config = load_config(write_language_config(tmp_path, model=model, strategy=strategy))
    reduced = reduce_config(config, FLOAT64, DEVICES)
    assert reduced.config.strategy["fsdp"].floor_bytes < 16384
    small = {key: after for key, (_, after) in reduced.changes.items()}
    assert (small["model.layers"], small["model.heads"], small["model.kv_heads"]) == (2, 8, 2)
    assert (small["model.width"], small["model.mlp_width"], small["data.length"]) == (32, 16, 8)
    assert reduced.config.model["tied"]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("name", "options", "sizes"),
    [
        ("adamw", {}, (8, 16)),
        ("adafactor", {}, (128, 128)),
        ("adafactor", {"mlp_width": 96}, (128, 16)),
        ("adafactor", {"mlp_width": 128}, (128, 128)),
        ("own_optimizer:make", {}, (128, 128)),
    ],
)
def test_sizes_at_which_the_optimizer_does_the_same(name, options, sizes, tmp_path):
    """Adafactor factors dims of 128 or more; a user's optimizer may do so."""
    (tmp_path / "own_optimizer.py").write_text("import optax\ndef make(learning_rate):\n    return optax.sgd(1e-3)\n")
    model = {"name": "transformer", "layers": 2, "width": 512, "heads": 8, "mlp_width": 2048, **options}
    more = {"strategy": {"fsdp": {"size": 4}, "data": 2}, "optimizer": {"name": name, "learning_rate": 0.01}}
    config = load_config(write_language_config(tmp_path, model=model, **more))
    small = reduce_config(config, FLOAT64, DEVICES).config.model
    assert (small["width"], small["mlp_width"]) == sizes


@pytest.mark.usefixtures("float64")
def test_token_ids_are_folded_into_a_smaller_vocabulary(tmp_path):
    ids = np.arange(4000, dtype=np.uint16) % 2000
    np.save(tmp_path / "ids.npy", ids)
    data = {"source": "tokens", "files": [str(tmp_path / "ids.npy")], "length": 64, "vocabulary": 2000}
    model = {"name": "transformer", "layers": 2, "width": 16, "heads": 2}
    config = load_config(write_config(tmp_path, model=model, data=data), ["train.clip_norm=0"])
    reduced = reduce_config(config, FLOAT64, DEVICES)
    assert reduced.config.train.clip_norm == 0, "clipping that is off stays off"
    clipped = replace(config, train=replace(config.train, clip_norm=1.0))
    assert reduce_config(clipped, FLOAT64, DEVICES).config.train.clip_norm == MAX_CLIP_NORM < 1
    vocabulary = reduced.config.model["vocabulary"]
    assert reduced.changes["model.vocabulary"] == (2000, vocabulary)
    assert vocabulary < 300
    assert gcd(vocabulary, 8) == gcd(2000, 8)
    batch = ragged_batch(reduced.splits.train, 0, rows=reduced.config.train.global_batch, seed=0, shuffle=True)
    assert batch["inputs"].shape == (8, 8)
    assert batch["inputs"].max() < vocabulary == reduced.splits.vocabulary


def test_weights_are_ragged_and_no_row_is_without(tmp_path):
    config = load_config(write_language_config(tmp_path))
    batch = ragged_batch(open_splits(config.data).train, 0, rows=config.train.global_batch, seed=0, shuffle=True)
    sums = batch["weights"].sum(axis=1)
    assert (sums > 0).all()
    assert len(set(sums)) > 3
    assert batch["weights"].dtype == np.float32


def test_compares_as_the_run_trains(tmp_path, monkeypatch):
    """Its rows in their order, its clipping and seed; the averages if it has some."""
    monkeypatch.setattr(verify_file, "verify_step", lambda step, batches, **given: (batches, given))
    options = {"data": {"source": "synthetic", "shuffle": False}, "run": {"simulate": 8, "seed": 3}}
    trained = {"steps": 2, "global_batch": 16, "clip_norm": 0.5}
    config = load_config(write_config(tmp_path, train=trained, strategy={"data": 8}, **options))
    (first, second), given = verify_file.verify_config(config, full=True, steps=2)
    rows = open_splits(config.data, (), 16).train
    for batch, start in ((first, 0), (second, 16)):
        assert np.array_equal(batch["inputs"], [rows[start + row]["inputs"] for row in range(16)])
    assert (given["clip_norm"], given["seed"], given["reduced"], given["averages"]) == (0.5, 3, {}, None)


@pytest.mark.parametrize(("simulate", "count"), [(4, 4), (0, 8)])
def test_compares_on_the_devices_that_the_config_simulates(simulate, count, tmp_path, monkeypatch):
    config = load_config(write_config(tmp_path, strategy={"data": -1}, run={"simulate": simulate}))
    monkeypatch.setattr(verify_file, "simulate_devices", lambda sizes, default: pytest.fail(f"{default} devices"))
    with pytest.raises(pytest.fail.Exception, match=f"^{count} devices"):
        verify_file.verify_config(config)


@pytest.mark.parametrize(
    ("strategy", "simulate", "count"), [({"data": 2, "fsdp": 2}, 4, 4), ({"data": -1}, 0, 8), ({"fsdp": -1}, 2, 2)]
)
def test_devices_are_those_that_the_strategy_needs(strategy, simulate, count, tmp_path):
    config = load_config(write_config(tmp_path, strategy=strategy, run={"simulate": simulate}))
    assert simulate_devices(axis_sizes(config.strategy), config.run.simulate or 8) == DEVICES[:count]
    assert simulate_devices({}, 8) == ["cpu:0"]


WHAT_TRAINS = {
    "freeze in a pipeline": [
        "strategy={pipe: {size: 2, schedule: zb_h1}, data: 4}",
        'optimizer.freeze=["embed/.*", "blocks/mlp/down", "blocks/attention/norm"]',
    ],
    "groups in a pipeline": [
        "strategy={pipe: {size: 2}, fsdp: {size: 4, floor_bytes: 256}}",
        'optimizer.groups={"blocks/mlp/.*": {name: lion}, "blocks/attention/.*": {betas: [0.5, 0.6]}}',
    ],
    "adapters": [
        "strategy={fsdp: {size: 8, floor_bytes: 64}}",
        'model.lora={rank: 2, match: ["blocks/attention/.*"], train: ["head/norm"]}',
    ],
}


@pytest.mark.long
@pytest.mark.parametrize("name", WHAT_TRAINS)
def test_what_trains_does_as_on_one_device(name, tmp_path, capsys):
    """And its state goes through files onto another mesh and back."""
    path = write_language_config(tmp_path)
    code, result = verify(path, *WHAT_TRAINS[name], capsys=capsys)
    assert code == 0, result["first_difference"]
