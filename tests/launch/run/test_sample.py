"""A run that will write no sample, though it was asked for, says so when it begins."""

import pytest
from runs import write_config, write_language_config
from spmdkit.configs import load_config
from spmdkit.launch.cli import main
from spmdkit.launch.run.build import build
from spmdkit.launch.run.sample import predicts_bytes, sample_text, why_no_sample, writes_text

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
    return why_no_sample(build(load_config(config, overrides)))


def test_a_model_without_predict(tmp_path):
    config = language_config(tmp_path, "sample_without", predicts=False)
    told = reason(config)
    assert told.startswith(
        "The model table has no `predict`, so no sample is written at the end. Give it one, `predict("
    )
    assert "logits (1, L, vocabulary)" in told
    assert told.endswith("See https://spmdkit.github.io/spmdkit/models.html. Set sample.length=0 where none is wanted.")
    assert "no `predict`" in reason(config, "sample={}"), "200 tokens, by default"
    assert reason(config, "sample.length=0") == ""
    assert reason(config, "model.predicts=true") == ""


def write_tokenizer(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["mesh", "axis", "layout", "step", "of", "the", "</s>"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="the"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_samples_text_with_the_tokenizer_of_the_data(tmp_path, capsys):
    write_tokenizer(tmp_path)
    config = language_config(tmp_path, "sample_words", predicts=True)
    overrides = [f"data.tokenizer={tmp_path}", "data.length=8"]
    built = build(load_config(config, overrides))
    assert why_no_sample(built) == ""
    assert writes_text(built)
    assert not predicts_bytes(built)
    params = built.step.init(0).params  # the likeliest token of a table of zeros is the first
    assert sample_text(built, params, "axis of", 2, 0.0) == "axis of mesh mesh"
    assert sample_text(built, params, "", 1, 0.0) == "</s> mesh"


def test_a_model_of_anything_but_text_is_asked_for_none_by_default(tmp_path):
    config = write_config(tmp_path)
    assert reason(config, "sample={}") == ""
    assert "the targets of mlp are neither bytes of text nor ids of a data.tokenizer" in reason(
        config, "sample.length=20"
    )


@pytest.mark.slow
def test_training_says_it_first_and_generate_says_the_same(tmp_path, capsys):
    config = language_config(tmp_path, "sample_train", predicts=False)
    assert main(["train", str(config)]) == 0
    printed = capsys.readouterr().out
    assert printed.index("The model table has no `predict`, so no sample") < printed.index("step 1")
    assert printed.count("has no `predict`") == 1
    for words in (["generate", str(config)], ["predict", str(config), "--out", str(tmp_path / "a.npz")]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: The model table has no `predict`, so it can")
        assert "See https://spmdkit.github.io/spmdkit/models.html." in error
