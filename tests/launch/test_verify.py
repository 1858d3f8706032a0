"""`spmdkit verify`: exit codes, what it prints, what it reduces, and that a planted mistake comes out."""

import json
from dataclasses import replace
from math import gcd

import numpy as np
import pytest
from runs import spmdkit, write_config, write_language_config
from spmdkit.configs import load_config
from spmdkit.data import DataConfig, open_splits
from spmdkit.launch.cli import main
from spmdkit.launch.reduce import Folded, reduce_config, shrink
from spmdkit.launch.verify import ragged_batch, simulated_devices
from spmdkit.parallel import local_step
from spmdkit.parallel.verify import FLOAT64

OWN_MODEL = """
import jax, jax.numpy as jnp
from spmdkit.parallel import Model

def make(features=0, hidden=12):
    def init(key):
        return {"in": jax.random.normal(key, (features, hidden)), "out": jnp.zeros((hidden, 10))}

    def loss(params, batch, key):
        scores = jax.nn.log_softmax(jnp.tanh(batch["inputs"] @ params["in"]) @ params["out"])
        losses = -jnp.take_along_axis(scores, batch["targets"][:, None], axis=-1)[:, 0]
        return (losses * batch["weights"]).sum(), batch["weights"].sum()

    return Model(init=init, loss=loss)
"""


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
    assert result["reduced"] == {
        "train.global_batch": {"from": 16, "to": 8},
        "model.widths": {"from": [32], "to": [16]},
    }
    assert not (tmp_path / "run").exists()


def test_as_tables_at_full_size(tmp_path, capsys):
    assert main(["verify", str(write_config(tmp_path)), "--full", "--float32", "--steps", "1"]) == 0
    text = capsys.readouterr().out
    assert "data=2, fsdp=4: 8 device(s) against one, in float32" in text
    assert "reduced size" not in text
    assert "parameters after 1 steps" in text
    assert text.endswith("The same as on one device.\n")


def test_a_planted_mistake_is_exit_code_1(tmp_path, capsys, monkeypatch):
    right = local_step.reduce_gradients

    def wrong(gradients, *rest):
        summed, scalars = right(gradients, *rest)
        summed["layers"][1]["bias"] = summed["layers"][1]["bias"] * 8
        return summed, scalars

    monkeypatch.setattr(local_step, "reduce_gradients", wrong)
    path = str(write_config(tmp_path))
    assert main(["verify", path]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "DIFFERENT from one device, first in: gradients of layers/1/bias" in text
    assert "8 times too large, as when summed twice over data x fsdp (sizes multiply to 8)" in text
    assert "DIFFERS" in text


def test_a_missing_sum_is_found_at_the_reduced_size(tmp_path, capsys, monkeypatch):
    right = local_step.reduce_gradients

    def wrong(gradients, *rest):
        return gradients, right(gradients, *rest)[1]

    monkeypatch.setattr(local_step, "reduce_gradients", wrong)
    code, result = verify(write_config(tmp_path), capsys=capsys)
    assert (code, result["ok"], result["loss_rel"]) == (1, False, None)
    assert result["first_difference"]["where"] == "layers/0/bias"
    assert "a missing psum over data x fsdp" in result["first_difference"]["hint"]
    assert result["reduced"]


@pytest.mark.parametrize("given", [["train.global_batch=9"], ["--steps", "0"], ["model.widths=[31]"]])
def test_what_cannot_work_is_exit_code_2(given, tmp_path, capsys):
    assert main(["verify", str(write_config(tmp_path)), *given]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_own_model_on_some_of_the_devices(tmp_path, capsys):
    (tmp_path / "verified_model.py").write_text(OWN_MODEL)
    path = write_config(
        tmp_path,
        run={"simulate": 4},
        model={"name": "verified_model:make"},
        strategy={"data": -1, "fsdp": {"size": 2, "floor_bytes": 256}},
        train={"steps": 5, "global_batch": 32, "accumulate": 2},
    )
    code, result = verify(path, capsys=capsys)
    assert code == 0, result
    assert (result["mesh"]["data"], result["mesh"]["fsdp"]) == (2, 2)
    assert result["reduced"] == {"train.global_batch": {"from": 32, "to": 8}}


@pytest.mark.slow
def test_language_model_with_dropout(tmp_path, capsys):
    train = {"steps": 12, "global_batch": 32, "accumulate": 2, "clip_norm": 0.1}
    code, result = verify(write_language_config(tmp_path, train=train), capsys=capsys)
    assert code == 0, result
    assert result["reduced"]["data.length"] == {"from": 16, "to": 8}
    assert {key: change["to"] for key, change in result["reduced"].items() if "model" in key} == {
        "model.width": 8,
        "model.mlp_width": 16,
    }


@pytest.mark.slow
def test_in_a_process_of_its_own(tmp_path):
    """It simulates just the devices that it needs."""
    ended = spmdkit("verify", write_config(tmp_path, run={}, strategy={"data": 2}), "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["mesh"]["data"] == 2


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
    reduced = reduce_config(config, FLOAT64, [f"cpu:{number}" for number in range(8)])
    assert reduced.config.strategy["fsdp"].floor_bytes < 16384
    small = {key: after for key, (_, after) in reduced.changes.items()}
    assert (small["model.layers"], small["model.heads"], small["model.kv_heads"]) == (2, 8, 2)
    assert (small["model.width"], small["model.mlp_width"], small["data.length"]) == (32, 16, 8)
    assert reduced.config.model["tied"]


@pytest.mark.usefixtures("float64")
def test_token_ids_are_folded_into_a_smaller_vocabulary(tmp_path):
    ids = np.arange(4000, dtype=np.uint16) % 2000
    np.save(tmp_path / "ids.npy", ids)
    data = {"source": "tokens", "files": [str(tmp_path / "ids.npy")], "length": 64, "vocabulary": 2000}
    model = {"name": "transformer", "layers": 2, "width": 16, "heads": 2}
    config = load_config(write_config(tmp_path, model=model, data=data))
    reduced = reduce_config(config, FLOAT64, [f"cpu:{number}" for number in range(8)])
    vocabulary = reduced.config.model["vocabulary"]
    assert reduced.changes["model.vocabulary"] == (2000, vocabulary)
    assert vocabulary < 300
    assert gcd(vocabulary, 8) == gcd(2000, 8)
    batch = ragged_batch(reduced.splits.train, reduced.config, 0)
    assert batch["inputs"].shape == (8, 8)
    assert batch["inputs"].max() < vocabulary == reduced.splits.vocabulary


def test_folded_examples_keep_everything_else():
    source = open_splits(DataConfig(source="synthetic")).train
    folded = Folded(source, 4)
    assert len(folded) == len(source)
    np.testing.assert_array_equal(folded[5]["weights"], source[5]["weights"])
    assert folded[5]["targets"] == source[5]["targets"] % 4


def test_weights_are_ragged_and_no_row_is_without(tmp_path):
    config = load_config(write_language_config(tmp_path))
    batch = ragged_batch(open_splits(config.data).train, config, 0)
    sums = batch["weights"].sum(axis=1)
    assert (sums > 0).all()
    assert len(set(sums)) > 3
    assert batch["weights"].dtype == np.float32


@pytest.mark.parametrize(
    ("strategy", "simulate", "count"), [({"data": 2, "fsdp": 2}, 4, 4), ({"data": -1}, 0, 8), ({"fsdp": -1}, 2, 2)]
)
def test_devices_are_those_that_the_strategy_needs(strategy, simulate, count, tmp_path):
    config = load_config(write_config(tmp_path, strategy=strategy, run={"simulate": simulate}))
    assert simulated_devices(config) == [f"cpu:{number}" for number in range(count)]
    assert simulated_devices(replace(config, strategy={})) == ["cpu:0"]
