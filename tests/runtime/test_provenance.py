"""The origin of a run: changed data is an error, changed source code of the user a warning."""

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from spmdkit.configs import load_config
from spmdkit.runtime import provenance
from spmdkit.runtime.build_run import build
from spmdkit.runtime.provenance import describe_run, remarks, user_code
from support.runs import train, unchanged, write_config
from support.user_code import LAYERS, MODEL, OPTIMIZER, OWN, edit, provenance_of_config


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    """A config with a model and an optimizer of the user, in files beside it."""
    for name, text in zip(OWN, (MODEL, LAYERS, OPTIMIZER), strict=True):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    optimizer = {"name": "optimizer_of_mine:make", "learning_rate": 0.01}
    return write_config(tmp_path, model={"name": "model_of_mine:make"}, optimizer=optimizer, strategy={"data": 8})


def remarks_on(config: Path, before, *overrides: str) -> list[str]:
    return remarks(before, provenance_of_config(config, *overrides), "synthetic", goes_on=True)


def test_model_of_the_catalog_has_no_files(tmp_path):
    found = provenance_of_config(write_config(tmp_path))
    assert found.code == {}
    assert len(found.fingerprint) == 16
    assert found.description.startswith("synthetic: 8,192 noisy images")


def test_finds_source_files_beside_the_module(config):
    found = provenance_of_config(config)
    assert {name: Path(path).name for name, (path, _) in found.code.items()} == {name: f"{name}.py" for name in OWN}


@pytest.mark.parametrize("name", ["pkg_of_mine", "pkg_of_mine.models.net"])
def test_finds_the_whole_package(name, tmp_path, monkeypatch):
    (tmp_path / "pkg_of_mine" / "models").mkdir(parents=True)
    for path in ("__init__.py", "layers.py", "models/__init__.py", "models/net.py"):
        (tmp_path / "pkg_of_mine" / path).write_text("")
    (tmp_path / "pkg_of_mine" / "models" / "net.py").write_text("from ..layers import __name__")
    (tmp_path / "beside_of_mine.py").write_text("import pkg_of_mine.models.net")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("beside_of_mine")
    found = user_code(f"{name}:make")
    names = ["pkg_of_mine", "pkg_of_mine.layers", "pkg_of_mine.models", "pkg_of_mine.models.net"]
    for module in ["beside_of_mine", *names]:
        monkeypatch.delitem(sys.modules, module)
    assert sorted(found) == ["beside_of_mine", *names]


def test_directories_that_begin_like_those_of_packages_are_not_installed(config, monkeypatch):
    monkeypatch.setattr(provenance, "INSTALLED", (f"{str(config.parent)[:-1]}{os.sep}",))
    assert "layers_of_mine" in provenance_of_config(config).code
    monkeypatch.setattr(provenance, "INSTALLED", (f"{config.parent}{os.sep}",))
    assert set(provenance_of_config(config).code) == {"model_of_mine", "optimizer_of_mine"}, "as in a .venv beside them"


def test_a_directory_whose_name_begins_like_that_of_the_model_is_another(config, monkeypatch):
    other = config.parent.with_name(f"{config.parent.name}-other")
    other.mkdir()
    (other / "tools.py").touch()
    monkeypatch.syspath_prepend(other)
    monkeypatch.setitem(sys.modules, "tools", importlib.import_module("tools"))
    assert sorted(provenance_of_config(config).code) == sorted(OWN)


@pytest.mark.parametrize("name", ["__main__", "__mp_main__"])
def test_a_script_beside_the_model_is_not_part_of_it(name, config, monkeypatch):
    """Processes of `multiprocessing` import the script under the second name."""
    script = ModuleType(name)
    script.__file__ = str(config.parent / "script.py")
    (config.parent / "script.py").touch()
    monkeypatch.setitem(sys.modules, name, script)
    assert sorted(provenance_of_config(config).code) == sorted(OWN)


@pytest.mark.slow
def test_unchanged_source_has_no_remarks(config):
    before = provenance_of_config(config)
    assert remarks_on(config, before, "train.steps=99", "optimizer.learning_rate=0.5") == []


@pytest.mark.parametrize(
    ("file", "old", "new"), [("layers_of_mine", "jnp.tanh", "jnp.sin"), ("optimizer_of_mine", "b1=0.9", "b1=0.8")]
)
def test_warns_of_changed_source(file, old, new, config):
    before = provenance_of_config(config)
    path = config.parent / f"{file}.py"
    edit(path, old, new)
    (line,) = remarks_on(config, before)
    assert line.startswith(f"warning: {path} has changed since this run was made, and")
    assert "start anew with --fresh" in line


def test_optimizer_of_a_group_counts(config):
    group = "optimizer.groups={'layers/0/.*': {name: 'optimizer_of_mine:make'}}"
    found = provenance_of_config(config, "model={name: mlp, classes: 10, widths: [32]}", "optimizer.name=sgd", group)
    assert "optimizer_of_mine" in found.code


def test_warns_of_missing_fingerprint_and_provenance(tmp_path):
    now = provenance_of_config(write_config(tmp_path))
    (line,) = remarks(None, now._replace(fingerprint=""), "mine:splits", goes_on=False)
    assert line.startswith("warning: data.source=mine:splits does not give a fingerprint: if its data changes, a ")
    (line,) = remarks(None, now, "synthetic", goes_on=True)
    assert line.startswith("provenance.json is missing")


@pytest.mark.slow
def test_refuses_changed_data_until_it_is_restored(tmp_path, cli):
    rows = {"inputs": np.ones((40, 64), np.float32), "targets": np.arange(40) % 10}
    data = {"source": "arrays", "files": [str(tmp_path / "rows.npz")], "eval_fraction": 0.0}
    np.savez(tmp_path / "rows.npz", **rows)
    config = write_config(tmp_path, data=data, train={"steps": 1, "global_batch": 16})
    train(config)
    np.savez(tmp_path / "rows.npz", **{**rows, "targets": np.roll(rows["targets"], 1)})
    with unchanged(tmp_path / "run"):
        error = cli(2, "train", config, "train.steps=2").err
    assert error.startswith(f"error: {tmp_path / 'run'} holds a run on other data: ")
    np.savez(tmp_path / "rows.npz", **rows)
    (tmp_path / "run" / "provenance.json").unlink()
    out = cli(0, "train", config, "train.steps=2").out
    assert "provenance.json is missing" in out
    assert "at step 1 of 2." in out
    assert (tmp_path / "run" / "provenance.json").is_file()


def test_describes_run_for_its_checkpoints(tmp_path):
    import spmdkit

    found = describe_run(build(load_config(write_config(tmp_path))))
    assert json.loads(json.dumps(found)) == found
    assert found["versions"]["spmdkit"] == spmdkit.__version__
    assert found["mesh"] == {"data": 2, "fsdp": 4}
    assert (found["devices"], found["processes"]) == (8, 1)
    assert found["strategy"]["fsdp"]["floor_bytes"] == 256
    assert found["parameters"] == 64 * 32 + 32 + 32 * 10 + 10
    assert found["precision"]["params"] == "float32"
    assert found["data"] == {"features": 64, "length": 256}
    assert (found["library"], found["lora_scale"]) == ("", None)
    model = {"name": "mlp", "classes": 10, "widths": [32], "lora": {"rank": 2, "alpha": 3, "match": ["layers/0/.*"]}}
    assert describe_run(build(load_config(write_config(tmp_path, model=model))))["lora_scale"] == 1.5
