"""What one does with a loaded run: every row counts once, whatever the mesh."""

import shutil
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmdkit.configs.schema import Config
from spmdkit.data.config import DataConfig
from spmdkit.data.sources.arrays import ArraySource
from spmdkit.layouts.paths import map_with_path
from spmdkit.mesh.errors import UserError
from spmdkit.models import hugging_face
from spmdkit.models.catalog import load_model
from spmdkit.models.generation import generate
from spmdkit.parallel.model import Model
from spmdkit.runtime import finish
from spmdkit.runtime.loading import loaded_run
from spmdkit.runtime.loading.loaded_run import LoadedRun
from spmdkit.runtime.provenance import Provenance, to_json
from support.runs import leave_run, train, whole, write_config, write_language_config

import spmdkit

ROWS = 1003
"""No multiple of 64, nor of 8: the last batch holds 43 rows."""

OWN = """
import jax.numpy as jnp
from spmdkit.parallel import Model

def counting(classes):
    def predict(params, batch):
        logits = batch["inputs"] @ params["kernel"]
        return {"logits": logits, "chosen": logits.argmax(-1).astype(jnp.int32)}
    def loss(params, batch, key):
        wrong = predict(params, batch)["chosen"] != batch["targets"]
        return (wrong * batch["weights"]).sum() + 0 * params["kernel"].sum(), batch["weights"].sum()
    def init(key):
        return {"kernel": jnp.sin(jnp.arange(64.0 * classes)).reshape(64, classes)}
    return Model(init=init, loss=loss, predict=predict, name="counting")
"""


def rows(number: int = ROWS) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    inputs = random.normal(size=(number, 64)).astype(np.float32)
    return {"inputs": inputs, "targets": random.integers(0, 10, number).astype(np.int32)}


@pytest.fixture(scope="session")  # a process imports `finished_counting` once
def counting(tmp_path_factory):
    """The folder of a run whose loss counts mistakes: a whole number, which no order of sums can change."""
    folder = tmp_path_factory.mktemp("counting")
    (folder / "finished_counting.py").write_text(OWN)
    np.savez(folder / "rows.npz", **rows())
    config = write_config(
        folder,
        model={"name": "finished_counting:counting", "classes": 10, "check": "off"},
        data={"source": "arrays", "files": ["rows.npz"], "eval_files": ["rows.npz"]},
        train={"steps": 12, "global_batch": 64},
    )
    return leave_run(config, steps=(4,))


def expected(run):
    """What NumPy makes of all rows."""
    logits = rows()["inputs"] @ whole(run.params)["kernel"]
    return logits, logits.argmax(-1)


@pytest.mark.parametrize("mesh", [None, {}, {"fsdp": {"size": 8, "floor_bytes": 64}}, {"data": 3}])
def test_metrics_are_exactly_those_of_one_device(mesh, counting):
    run = spmdkit.load_run(counting, mesh=mesh)
    wrong, first = expected(run)[1] != rows()["targets"], 2 * run.batch_rows
    assert run.evaluate() == {"loss": int(wrong.sum()) / ROWS}
    assert run.evaluate(max_batches=2)["loss"] == int(wrong[:first].sum()) / first


@pytest.mark.parametrize("mesh", [None, {}])
def test_as_many_rows_come_out_as_went_in_and_in_order(mesh, counting):
    run = spmdkit.load_run(counting, mesh=mesh)
    batches = list(run.predictions(keep=("targets", "example")))
    assert [len(batch["example"]) for batch in batches] == [64] * 15 + [43]
    found = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    logits, chosen = expected(run)
    assert found.keys() == {"predictions/logits", "predictions/chosen", "targets", "example"}
    np.testing.assert_array_equal(found["example"], np.arange(ROWS))
    np.testing.assert_array_equal(found["targets"], rows()["targets"])
    np.testing.assert_array_equal(found["predictions/chosen"], chosen)
    np.testing.assert_allclose(found["predictions/logits"], logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("number", [1, 8, 11])
def test_rows_of_the_users_own(number, counting):
    run = spmdkit.load_run(counting)
    found = run.predict({"inputs": rows()["inputs"][:number].tolist()})
    np.testing.assert_array_equal(found["chosen"], expected(run)[1][:number])
    assert isinstance(found["logits"], np.ndarray)
    wrong = (expected(run)[1] != rows()["targets"])[:number].sum()
    arrays = {name: array[:number] for name, array in rows().items()}
    assert run.evaluate(arrays)["loss"] == wrong / number == run.evaluate(ArraySource(arrays))["loss"]


def test_weights_count(counting):
    run = spmdkit.load_run(counting)
    weights = (np.arange(ROWS) % 3).astype(np.float32)
    wrong = (expected(run)[1] != rows()["targets"]) * weights
    assert run.evaluate({**rows(), "weights": weights})["loss"] == pytest.approx(wrong.sum() / weights.sum(), rel=1e-12)


def test_a_batch_that_the_model_cannot_take_is_told(counting):
    run = spmdkit.load_run(counting)
    with pytest.raises(UserError, match=r"model 'counting': predict fails in .*finished_counting\.py, line 7 .*KeyE"):
        run.predict({"input": np.zeros((2, 64))})
    with pytest.raises(UserError, match=r"one row per example on dim 0; these have \{'inputs': 2, 'targets': 3\}"):
        run.predict({"inputs": np.zeros((2, 64)), "targets": np.zeros(3)})
    with pytest.raises(UserError, match=r"predict got a list: a batch must be a dict of arrays"):
        run.predict([1, 2])
    with pytest.raises(UserError, match=r"model 'counting': loss fails in .*TypeError"):
        run.evaluate({"inputs": np.zeros((2, 3), np.float32), "targets": np.zeros(2, np.int32)})
    with pytest.raises(UserError, match=r"lacks the array 'targts' to keep: .* Did you mean targets\?"):
        list(run.predictions(keep=["targts"]))


def test_a_run_without_an_evaluation_split(counting):
    run = spmdkit.load_run(counting, changes=["data.eval_files=[]", "data.eval_fraction=0"])
    with pytest.raises(UserError, match=r"lacks an evaluation split \(data\.eval_fraction=0.*\)\. Give other data"):
        run.evaluate()
    assert 0 < run.evaluate(run.splits.train)["loss"] < 1


@pytest.mark.slow
def test_text_of_a_language_model(staged):
    run = spmdkit.load_run(staged.parent / "run", mesh={})
    tokens = run.generate("mesh ", length=5, temperature=0)
    assert (tokens[:5], len(tokens)) == (list(b"mesh "), 10)
    assert tokens == generate(run.model, run.params, "mesh ", length=5, window=16, temperature=0)
    assert run.text(b"ab\xff") == "ab\N{REPLACEMENT CHARACTER}"
    with pytest.raises(UserError, match=r"length=0 and window="):
        run.generate("mesh ", length=0)


def test_exports_the_averages_that_it_was_loaded_with(monkeypatch):
    exported = []
    monkeypatch.setattr(loaded_run, "export", lambda *given, **options: exported.append((given, options)))
    for ema in (True, False):
        LoadedRun.export(SimpleNamespace(_stored="stored", ema=ema), "out.npz")  # pyright: ignore[reportArgumentType]
    assert [(given[0], options["ema"]) for given, options in exported] == [("stored", True), ("stored", False)]


@pytest.mark.slow
def test_tokens_that_are_no_bytes(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 60, (64, 9)).astype(np.int32)
    np.savez(tmp_path / "ids.npz", inputs=tokens[:, :-1], targets=tokens[:, 1:])
    data = {"source": "arrays", "files": ["ids.npz"], "vocabulary": 60, "length": 8}
    config = write_config(tmp_path, model={**TRANSFORMER, "layers": 1}, data=data, strategy={"data": 8})
    run = spmdkit.load_run(leave_run(config, steps=(4,)), mesh={})
    assert run.generate("17 4, 25", length=2, seed=1) == run.generate([17, 4, 25], length=2, seed=1)
    other_seed = spmdkit.load_run(run.folder, changes=["run.seed=5"], mesh={})
    assert other_seed.generate([17, 4], length=8, seed=0) == run.generate([17, 4], length=8)
    assert run.text([17, 4]) == "17 4"
    assert len(run.generate([17, 4], length=3)) == 5
    assert len(run.generate(length=3)) == 3
    with pytest.raises(UserError, match=r"'def ' is text, but the tokens of transformer are ids from 0 to 59, not"):
        run.generate("def ")
    with pytest.raises(spmdkit.UserError, match=r"inputs of .* is 60; vocabulary=60 allows 0 \.\. 59"):
        run.evaluate({"inputs": np.full((2, 8), 60, np.int32), "targets": np.zeros((2, 8), np.int32)})


def test_a_classifier_cannot_continue_a_prompt(folder):
    with pytest.raises(UserError, match=r"The inputs of mlp are 64 numbers, not tokens, so it cannot continue a pro"):
        spmdkit.load_run(folder).generate([1])


def test_data_that_is_not_what_the_run_was_made_of_is_told(folder, tmp_path):
    copied = shutil.copytree(folder, tmp_path / "run")
    now = spmdkit.load_run(folder, mesh={}).splits
    origin = Provenance("0123", "other digits")
    (copied / "provenance.json").write_text(to_json(origin))
    with pytest.warns(UserWarning, match=r"was made of: then other digits, now synthetic: .* may hold rows that the"):
        _ = spmdkit.load_run(copied, mesh={}).splits
    _ = spmdkit.load_run(copied, mesh={}, changes=["data.eval_fraction=0.1"]).splits  # asked for
    (copied / "provenance.json").write_text(to_json(origin._replace(fingerprint=now.fingerprint)))
    assert spmdkit.load_run(copied, mesh={}).splits.fingerprint == now.fingerprint != ""


def test_other_data_must_fit_the_model(folder, tmp_path):
    np.savez(tmp_path / "new.npz", inputs=np.zeros((8, 64), np.float32), targets=np.full(8, 10, np.int32))
    run = spmdkit.load_run(folder, changes=["data.source=arrays", f"data.files=[{tmp_path}/new.npz]"])
    with pytest.raises(UserError, match=r"targets of .*new\.npz.* is 10"):
        run.splits  # noqa: B018


def test_generates_from_the_window_that_the_model_was_trained_on(monkeypatch):
    """The model predicts the first token of its window: with 4 of them, the token 4 places back."""

    def oldest(params, batch):
        return jax.nn.one_hot(jnp.broadcast_to(batch["inputs"][:, :1], batch["inputs"].shape), 10)

    model = Model(init=lambda key: {}, loss=lambda *_: (0, 0), predict=oldest, name="oldest")
    given = {"params": {"w": jnp.ones(())}, "model": model, "model_state": (), "writes_text": False}
    run = SimpleNamespace(config=Config(), facts={"length": 4}, **given)
    assert LoadedRun.generate(run, [1, 2, 3, 4, 5, 6], length=5, temperature=0)[6:] == [3, 4, 5, 6, 3]
    built = SimpleNamespace(model=model, layouts=None, config=Config(data=DataConfig(length=4)))
    monkeypatch.setattr(finish, "stored_order", lambda layouts: SimpleNamespace(to_model=lambda params: params))
    text = finish.sample_text(built, given["params"], "\x01\x02\x03\x04\x05\x06", 5, 0.0)
    assert text[6:] == "\x03\x04\x05\x06\x03"


@pytest.mark.slow
def test_exports_adapters_merged_at_the_scale_of_the_model(tmp_path):
    """With the exported parameters, the model without adapters predicts what the model with them does."""
    adapters = {"rank": 2, "alpha": 6.0, "match": ["layers/0/.*"]}
    config = write_config(tmp_path, model={"name": "mlp", "classes": 10, "widths": [32], "lora": adapters})
    leave_run(config, steps=(4,), change=lambda path, leaf: leaf + 0.5 if path.endswith("/b") else leaf)
    run = spmdkit.load_run(tmp_path / "run", mesh={})
    run.export(tmp_path / "merged")
    base = load_model({"name": "mlp", "classes": 10, "widths": [32]}, **run.facts)
    shapes = jax.eval_shape(base.init, jax.random.key(0))
    merged = map_with_path(lambda path, leaf: np.load(tmp_path / "merged" / f"{path}.npy"), shapes)
    batch = {"inputs": rows(8)["inputs"]}
    np.testing.assert_allclose(base.predict(merged, batch), run.predict(batch), rtol=1e-4, atol=1e-4)
    run.export(tmp_path / "separate", lora="separate")
    kernel = np.load(tmp_path / "separate" / "layers/0/kernel.npy")
    assert np.abs(kernel - merged["layers"][0]["kernel"]).max() > 0.1, "the adapters do something"


def test_warns_if_the_log_has_another_evaluation(folder, tmp_path):
    copied = shutil.copytree(folder, tmp_path / "run")
    run = spmdkit.load_run(copied, mesh={})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = run.evaluate(max_batches=2)["loss"]
        (copied / "metrics.jsonl").write_text(f'{{"step": 4, "eval_loss": 9}}\n{{"step": 8, "eval_loss": {loss}}}\n')
        assert run.evaluate(max_batches=2)["loss"] == loss
    (copied / "metrics.jsonl").write_text(f'{{"step": 8, "eval_loss": {loss * 1.005}}}\n')
    with pytest.warns(UserWarning, match=rf"loss {loss:.6g} here, {loss * 1.005:.6g} in the log"):
        run.evaluate(max_batches=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.evaluate(max_batches=1)  # other rows than in the log


TRANSFORMER = {"name": "transformer", "layers": 2, "width": 16, "heads": 2, "mlp_width": 32}


@pytest.mark.long_cases("adapters", "whole")
@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 2, "match": ["blocks/attention/.*"]}], ids=["whole", "adapters"])
def test_it_is_the_model_of_the_run(lora, tmp_path, cli):
    model = {**TRANSFORMER, **({"lora": lora} if lora else {})}
    config = write_language_config(tmp_path, model=model, strategy={"fsdp": {"size": 8, "floor_bytes": 64}})
    train(config, "train.steps=3", "sample.length=0")
    run = spmdkit.load_run(tmp_path / "run")
    exported = cli(0, "export", tmp_path / "run", tmp_path / "out", "--to", "hugging_face").out
    assert "config.json and the weights of step 3" in exported
    loaded = hugging_face.load(tmp_path / "out", length=run.config.data.length)
    assert (tmp_path / "out" / "config.json").is_file()
    inputs = np.arange(2 * run.config.data.length, dtype=np.int32).reshape(2, -1) % 100
    expected = run.predict({"inputs": inputs})
    params = jax.tree.map(np.asarray, loaded.params)
    found = jax.jit(loaded.model.predict)(params, {"inputs": inputs})
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    if lora:  # what was trained is in it
        query = np.asarray(run.params["blocks"]["attention"]["query"])
        assert np.abs(np.asarray(params["blocks"]["attention"]["query"]) - query).max() > 0


@pytest.mark.slow
def test_a_run_of_hugging_face_is_exported_as_one(tmp_path, cli):
    """By default, a folder of Hugging Face; other kinds are exported if they are named."""
    first = write_language_config(tmp_path, model=TRANSFORMER, strategy={"data": 8})
    train(first, "train.steps=1", "sample.length=0")
    cli(0, "export", tmp_path / "run", tmp_path / "base", "--to", "hugging_face")
    model = {"name": "hugging_face", "folder": str(tmp_path / "base")}
    config = write_language_config(tmp_path / "tuned", model=model, strategy={"data": 8})
    train(config, "train.steps=1", "sample.length=0")
    folder = tmp_path / "tuned" / "run"
    cli(0, "export", folder, tmp_path / "out")
    run = spmdkit.load_run(folder)
    embedding = np.asarray(hugging_face.load(tmp_path / "out", length=run.config.data.length).params["embed"]["tokens"])
    np.testing.assert_array_equal(embedding, run.params["embed"]["tokens"])
    assert np.any(embedding != hugging_face.load(tmp_path / "base").params["embed"]["tokens"]), "it was trained"
    for words in (["a.safetensors"], ["arrays", "--to", "npy"]):
        exported = cli(0, "export", folder, tmp_path / words[0], *words[1:]).out
        assert f"For transformers: spmdkit export {folder} DIRECTORY" in exported
        assert not (tmp_path / words[0] / "config.json").exists()


def test_export_rejects_whole_state_for_hugging_face_runs(tmp_path, cli):
    folder = leave_run(write_config(tmp_path), steps=(4,))
    config = folder / "config.yaml"
    config.write_text(config.read_text(encoding="utf-8").replace("name: mlp", "name: hugging_face"), encoding="utf-8")
    error = cli(2, "export", folder, tmp_path / "out", "--whole-state").err
    assert "the default for a run of this model. Add --to npy, or remove it." in error


def test_export_rejects_incompatible_options(tmp_path, cli):
    folder = leave_run(write_config(tmp_path), steps=(4,))
    for words, message in (
        ([], "model.name='mlp' is not of a Hugging Face family"),
        (["--whole-state"], "--whole-state cannot be used with --to hugging_face"),
        (["--force"], "--force cannot be used with --to hugging_face"),
        (["--lora", "separate"], "--lora separate cannot be used with --to hugging_face"),
    ):
        assert message in cli(2, "export", folder, tmp_path / "out", "--to", "hugging_face", *words).err
    assert not (tmp_path / "out").exists()
