"""A run written as a folder of Hugging Face: read back, it is the same model, with adapters merged."""

import jax
import numpy as np
import pytest
from runs import write_config, write_language_config
from small_runs import leave_run
from spmdkit.launch.cli import main
from spmdkit.models import hugging_face

import spmdkit

TRANSFORMER = {"name": "transformer", "layers": 2, "width": 16, "heads": 2, "mlp_width": 32}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 2, "match": ["blocks/attention/.*"]}], ids=["whole", "adapters"])
def test_it_is_the_model_of_the_run(lora, tmp_path, capsys):
    model = {**TRANSFORMER, **({"lora": lora} if lora else {})}
    config = write_language_config(tmp_path, model=model, strategy={"fsdp": {"size": 8, "floor_bytes": 64}})
    assert main(["train", str(config), "train.steps=3", "sample.length=0"]) == 0
    run = spmdkit.load_run(tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "hugging_face"]) == 0
    assert "config.json and the weights of step 3" in capsys.readouterr().out
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
def test_a_run_of_hugging_face_is_exported_as_one(tmp_path, capsys):
    """By default, a folder of Hugging Face; other kinds are exported if they are named."""
    first = write_language_config(tmp_path, model=TRANSFORMER, strategy={"data": 8})
    assert main(["train", str(first), "train.steps=1", "sample.length=0"]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "base"), "--to", "hugging_face"]) == 0
    (tmp_path / "tuned").mkdir()
    model = {"name": "hugging_face", "folder": str(tmp_path / "base")}
    config = write_language_config(tmp_path / "tuned", model=model, strategy={"data": 8})
    assert main(["train", str(config), "train.steps=1", "sample.length=0"]) == 0
    folder = tmp_path / "tuned" / "run"
    assert main(["export", str(folder), str(tmp_path / "out")]) == 0
    capsys.readouterr()
    run = spmdkit.load_run(folder)
    embedding = np.asarray(hugging_face.load(tmp_path / "out", length=run.config.data.length).params["embed"]["tokens"])
    np.testing.assert_array_equal(embedding, run.params["embed"]["tokens"])
    assert np.any(embedding != hugging_face.load(tmp_path / "base").params["embed"]["tokens"]), "it was trained"
    for words in (["a.safetensors"], ["arrays", "--to", "npy"]):
        assert main(["export", str(folder), str(tmp_path / words[0]), *words[1:]]) == 0
        assert f"For transformers: spmdkit export {folder} FOLDER" in capsys.readouterr().out
        assert not (tmp_path / words[0] / "config.json").exists()


def test_options_of_arrays_are_not_for_a_run_of_hugging_face(tmp_path, capsys):
    folder = leave_run(write_config(tmp_path), steps=(4,))
    config = folder / "config.yaml"
    config.write_text(config.read_text(encoding="utf-8").replace("name: mlp", "name: hugging_face"), encoding="utf-8")
    assert main(["export", str(folder), str(tmp_path / "out"), "--unstack"]) == 2
    assert "the default for a run of this model. Give --to npy, or leave it out." in capsys.readouterr().err


def test_what_cannot_be(tmp_path, capsys):
    folder = leave_run(write_config(tmp_path), steps=(4,))
    assert main(["export", str(folder), str(tmp_path / "out"), "--to", "hugging_face"]) == 2
    assert "model.name='mlp' is of no family of Hugging Face" in capsys.readouterr().err
    assert main(["export", str(folder), str(tmp_path / "out"), "--to", "hugging_face", "--unstack"]) == 2
    assert "--unstack is not for --to hugging_face" in capsys.readouterr().err
    assert main(["export", str(folder), str(tmp_path / "out"), "--to", "hugging_face", "--lora", "separate"]) == 2
    assert "--lora separate is not for --to hugging_face" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
