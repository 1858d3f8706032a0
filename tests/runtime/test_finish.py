"""The end of a run: verdict, sample and report."""

from types import SimpleNamespace

import jax
import pytest
from spmdkit.configs import load_config
from spmdkit.data import bigram_loss
from spmdkit.runtime.build_run import build
from spmdkit.runtime.finish import (
    baselines,
    describe_losses,
    explain_missing_sample,
    measured_memory,
    sample_text,
    writes_text,
)
from support.runs import metrics, write_config, write_language_config

SHORT = {"train": {"steps": 2, "global_batch": 16}, "checkpoint": {"every": 0}}


@pytest.mark.long
@pytest.mark.slow
def test_a_language_model_is_judged_and_writes(tmp_path, cli):
    sample = {"length": 12, "prompt": "the mesh"}
    printed = cli(0, "train", write_language_config(tmp_path, sample=sample, **SHORT)).out
    last = metrics(tmp_path / "run")[-1]
    assert f"Evaluation loss {last['eval_loss']:.4f} after 2 steps." in printed
    assert "of a bigram model fitted on the same training text." in printed
    text = printed.partition("A sample of what it writes:\n\n")[2]
    assert text.startswith("the mesh")
    report = tmp_path / "run" / "report.html"
    assert f"Wrote {report}" in printed
    assert "the mesh" in report.read_text(encoding="utf-8")
    assert "blocks/attention/query" in report.read_text(encoding="utf-8")


@pytest.mark.parametrize("batches", [1, 3, 0])
def test_the_bigram_model_is_measured_on_the_rows_that_the_model_is(batches, tmp_path):
    """`eval.batches` batches of `train.global_batch` rows; 0 is the whole split."""
    config = write_language_config(tmp_path, **SHORT | {"eval": {"every": 0, "batches": batches}})
    built = build(load_config(config))
    measured = built.splits.evaluation
    rows = batches * 16 or len(measured)
    assert rows <= len(measured)
    few = [measured[index] for index in range(rows)]
    expected = bigram_loss(built.splits.train, few, 256)
    assert dict(baselines(built)) == {"bigram_loss": pytest.approx(expected, rel=1e-12)}


@pytest.mark.parametrize(("bigram", "side"), [(2.0, "below"), (1.5, "not below"), (1.2, "not below")])
def test_describes_losses(bigram, side):
    summary = {"eval_loss": 1.5, "steps": 7, "bigram_loss": bigram}
    assert list(describe_losses(summary)) == [
        "Evaluation loss 1.5000 after 7 steps.",
        f"That is {side} the {bigram:.4f} of a bigram model fitted on the same training text.",
    ]


@pytest.mark.parametrize(
    ("peaks", "measured"), [((5, 9, 0), {"fullest device": 9}), ((0, 0), {}), ((None, 7), {"fullest device": 7})]
)
def test_memory_of_accelerators_is_that_of_the_fullest(peaks, measured, monkeypatch):
    """A backend that does not count its memory returns None."""
    stats = [None if peak is None else {"bytes_in_use": 1, "peak_bytes_in_use": peak} for peak in peaks]
    devices = [SimpleNamespace(platform="gpu", memory_stats=lambda each=each: each) for each in stats]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert measured_memory() == measured


OWN = """
import jax.numpy as jnp
from spmdkit import Model

def table(vocabulary, predicts=False):
    def predict(params, batch):
        return params["table"][batch["inputs"]]

    def loss(params, batch, key):
        logits = predict(params, batch)
        shifted = logits - logits.max(-1, keepdims=True)
        chosen = jnp.take_along_axis(shifted, batch["targets"][..., None], -1)[..., 0]
        losses = jnp.log(jnp.exp(shifted).sum(-1)) - chosen
        return (losses * batch["weights"]).sum(), batch["weights"].sum()

    def init(key):
        return {"table": jnp.zeros((vocabulary, 256))}

    return Model(init=init, loss=loss, predict=predict if predicts else None, name="table")
"""


def language_config(folder, name, predicts, **sections):
    """The config of a model of one's own over bytes of text, with a `predict` or without."""
    (folder / f"{name}.py").write_text(OWN, encoding="utf-8")
    model = {"name": f"{name}:table", "predicts": predicts}
    data = {"strategy": {"data": 8}, "train": {"steps": 1, "global_batch": 16}}
    return write_language_config(folder, model=model, **{"sample": {"length": 2}, **data, **sections})


def reason(config, *overrides):
    return explain_missing_sample(build(load_config(config, overrides)))


@pytest.mark.slow
def test_a_model_without_predict(tmp_path):
    config = language_config(tmp_path, "sample_without", predicts=False)
    told = reason(config)
    assert told.startswith(
        "The model table does not define `predict`, so no sample is written at the end. Give it one, `predict("
    )
    assert "logits (1, L, vocabulary)" in told
    assert "not define `predict`" in reason(config, "sample={}"), "200 tokens, by default"
    assert reason(config, "sample.length=0") == ""
    assert reason(config, "model.predicts=true") == ""


def write_tokenizer(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["mesh", "axis", "layout", "step", "of", "the", "</s>"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="the"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.slow
def test_samples_text_with_the_tokenizer_of_the_data(tmp_path, capsys):
    write_tokenizer(tmp_path)
    config = language_config(tmp_path, "sample_words", predicts=True)
    overrides = [f"data.tokenizer={tmp_path}", "data.length=8"]
    built = build(load_config(config, overrides))
    assert explain_missing_sample(built) == ""
    assert writes_text(built)
    assert dict(baselines(built)) == {}, "a bigram model of bytes is no fair baseline"
    params = built.step.init(0).params  # the likeliest token of a table of zeros is the first
    assert sample_text(built, params, "axis of", 2, 0.0) == "axis of mesh mesh"
    assert sample_text(built, params, "", 1, 0.0) == "</s> mesh"


def test_a_model_of_anything_but_text_has_no_sample(tmp_path):
    assert reason(write_config(tmp_path), "sample.length=20") == ""
