"""Which run an argument means."""

import os
import shutil

import pytest
from spmdkit.checkpoints.damage import CheckpointError
from spmdkit.mesh.errors import UserError
from spmdkit.runtime.loading.find_run import find_folder, find_run
from support.runs import write_config


@pytest.mark.parametrize(
    ("given", "step"), [("run", 8), ("run/checkpoints", 8), ("run/checkpoints/4", 4), ("run/4", 4)]
)
def test_a_folder(given, step, untrained, folder):
    place = find_run(untrained.parent / given)
    assert place.found.one == folder / "checkpoints" / str(step)
    assert place.config == folder / "config.yaml"
    assert find_run(folder, 4).found.one == folder / "checkpoints" / "4"


def test_the_config_that_trained_it(untrained, folder, tmp_path, monkeypatch):
    place = find_run(untrained, 4)
    assert (place.found.one, place.config) == (folder / "checkpoints" / "4", untrained)
    (tmp_path / "runs").mkdir()
    os.symlink(folder, tmp_path / "runs" / "mlp")
    monkeypatch.chdir(tmp_path)
    assert find_run("mlp").found.run == tmp_path / "runs" / "mlp"  # a preset
    assert find_run("mlp", changes=[f"run.dir={folder}"]).found.run == folder
    (tmp_path / "mlp").mkdir()
    (tmp_path / "mlp" / "metrics.jsonl").touch()
    assert find_folder("mlp") == tmp_path / "mlp", "a directory comes before a preset"


def test_a_config_that_was_not_trained(tmp_path):
    config = write_config(tmp_path)
    with pytest.raises(UserError, match=r"sets run\.dir=.*run, and that directory does not exist: it is not trained"):
        find_run(config)


def test_what_there_is_instead_is_named(folder, tmp_path):
    new = tmp_path / "new"
    new.mkdir()
    shutil.copy(folder / "config.yaml", new)
    with pytest.raises(CheckpointError, match=r"new holds a run that has saved no checkpoint yet\. Wait for its first"):
        find_run(new)
    (new / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match=r"No complete checkpoint in .*new/checkpoints"):
        _ = find_run(new).found.one


def test_an_empty_name_is_not_the_working_directory(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for find_it in (find_run, find_folder):
        with pytest.raises(UserError, match=r"The name of a run is empty\. Give its directory"):
            find_it("")
    assert find_folder(".") == find_run(".").found.run == folder


def test_without_its_config(folder, tmp_path):
    copied = shutil.copytree(folder, tmp_path / "run")
    (copied / "config.yaml").unlink()
    with pytest.raises(UserError, match=r"has checkpoints, but config\.yaml, which names their model, is missing"):
        _ = find_run(copied).config
