"""The folder of a run stands for the config that it holds."""

from pathlib import Path

import pytest
from runs import write_config
from spmdkit.configs import ConfigError, load_config, resolved_yaml
from spmdkit.configs.run_folders import is_run_folder, of_run_folder, run_of_checkpoint


@pytest.fixture
def run(tmp_path) -> Path:
    """A run that was moved to another folder."""
    folder = tmp_path / "moved to" / "here"
    (folder / "checkpoints" / "40").mkdir(parents=True)
    config = load_config(write_config(tmp_path), ["train.steps=7", "run.dir=runs/before"])
    (folder / "config.yaml").write_text(resolved_yaml(config))
    return folder


def test_it_is_its_config_with_that_folder(run):
    config = load_config(run)
    assert (config.train.steps, config.run.dir, config.source) == (7, str(run), run / "config.yaml")
    changed = load_config(run, ["train.steps=9", "run.dir=elsewhere"])
    assert (changed.train.steps, changed.run.dir) == (9, "elsewhere")


def test_relative_as_it_is_typed(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    assert load_config("here").run.dir == "here"
    monkeypatch.chdir(run)
    assert load_config(".").run.dir == "."


def test_other_folders_are_no_runs(tmp_path):
    assert not is_run_folder(tmp_path)
    for text in ("- a\n", "", "a: [", "train: {steps: 3}\n"):
        (tmp_path / "config.yaml").write_text(text)
        assert not is_run_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"this is a folder\. Give a file in it \(config\.yaml\)"):
        load_config(tmp_path)
    assert of_run_folder(tmp_path, ["a=1"]) == (tmp_path, ["a=1"])
    (tmp_path / "metrics.jsonl").touch()
    assert is_run_folder(tmp_path), "of an earlier version, which had fewer sections"


def test_a_preset_goes_before_a_folder_of_its_name(run, monkeypatch):
    run.rename(run.parent / "quickstart")
    monkeypatch.chdir(run.parent)
    assert of_run_folder("quickstart") == ("quickstart", [])
    assert load_config("./../moved to/quickstart").train.steps == 7


def test_an_empty_name_is_not_the_working_directory(run, monkeypatch):
    monkeypatch.chdir(run)
    with pytest.raises(ConfigError, match=r"1 problem in an empty name:\n  give the path of a YAML file"):
        load_config("")
    assert of_run_folder("") == ("", [])


@pytest.mark.parametrize("name", ["logs", "logs/older", "checkpoints/40/params"])
def test_other_folders_of_a_run_hold_no_checkpoints(name, run):
    (run / name).mkdir(parents=True)
    assert run_of_checkpoint(run / name) is None
    with pytest.raises(ConfigError, match=r"this is a folder\. Give a YAML file, or a preset\."):
        load_config(run / name)


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/40"])
def test_a_checkpoint_says_which_run(name, run):
    assert run_of_checkpoint(run / name) == run
    assert run_of_checkpoint(run.parent) is None
    with pytest.raises(
        ConfigError, match=r"holds checkpoints of the run .*here\. To go on with that run, give .*here;"
    ):
        load_config(run / name)
