"""Presets, run directories and the messages for anything else."""

from pathlib import Path

import pytest
from spmdkit.configs import ConfigError, load_config, resolved_yaml
from spmdkit.configs.config_sources import (
    SCHEMA_LINE,
    describe_presets,
    find_config,
    is_run_directory,
    preset_names,
    preset_text,
    resolve_run_directory,
    run_of_checkpoint,
    starter_text,
)
from spmdkit.configs.config_text import as_plain
from spmdkit.configs.schema import Config
from spmdkit.configs.yaml_reader import read_yaml
from support.runs import write_config


@pytest.mark.parametrize("name", preset_names())
def test_preset_is_short_documented_and_has_no_defaults(name):
    """`model.name` and sizes of the strategy may repeat defaults, because a preset is about them."""
    assert load_config(name).run.dir == f"runs/{name}"
    text = preset_text(name)
    lines = text.splitlines()
    assert lines[0] == SCHEMA_LINE
    of_full_size = "full size" in lines[2]
    assert f"spmdkit {'explain' if of_full_size else 'train'} {name}" in lines[1]
    assert lines[2].endswith(".")
    assert lines[2].removeprefix("# ") in describe_presets()
    assert len(lines[2]) <= 105
    assert any(line.startswith("# sizes: " if of_full_size else "# expect: ") for line in lines)
    assert len(lines) <= 30
    defaults = as_plain(Config())
    repeated = [
        f"{section}.{key}"
        for section, values in read_yaml(text).value.items()
        if section not in ("model", "strategy")
        for key, value in values.items()
        if defaults[section].get(key) == value
    ]
    assert repeated == []


def test_starter_is_a_valid_config(tmp_path):
    (tmp_path / "my.yaml").write_text(starter_text())
    assert starter_text().startswith(SCHEMA_LINE)
    assert load_config(tmp_path / "my.yaml").run.simulate == 8


def test_finds_presets_with_or_without_ending():
    assert find_config("quickstart") == find_config("quickstart.yaml")
    assert preset_text("fsdp.yaml") == preset_text("fsdp")
    with pytest.raises(ConfigError, match=r"unknown preset\. Did you mean fsdp"):
        preset_text("fdsp")


def test_file_goes_before_preset(tmp_path, monkeypatch):
    (tmp_path / "quickstart.yaml").write_text("train: {global_batch: 16}\n")
    monkeypatch.chdir(tmp_path)
    assert load_config("quickstart.yaml").train.global_batch == 16
    assert load_config("quickstart").source.parent.name == "presets"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("quickstrat", r"no such file or preset\. Did you mean quickstart\? Presets: 3d, "),
        ("elsewhere/quickstart.yaml", "no such file or preset"),
        ("/dev/null", r"not a regular file\. Give the path of a YAML file, or a preset\."),
        ("c" * 300, r"no such file or preset: File name too long\."),
        ("", r"1 problem in an empty name:\n  expected a YAML file, a preset or the directory of a run"),
        ("directory", r"this is a directory\. Give the path of a YAML file, or a preset\."),
        ("binary.yaml", r"the file cannot be read: line 1: the byte 0xff is not valid UTF-8"),
    ],
)
def test_rejects_other_sources(source, message, tmp_path, monkeypatch):
    (tmp_path / "directory").mkdir()
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xff")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_config(source)


@pytest.fixture
def run(tmp_path) -> Path:
    """Returns the directory of a run that was moved."""
    directory = tmp_path / "moved to" / "here"
    (directory / "checkpoints" / "40").mkdir(parents=True)
    config = load_config(write_config(tmp_path), ["train.steps=7", "run.dir=runs/before"])
    (directory / "config.yaml").write_text(resolved_yaml(config))
    return directory


def test_run_directory_stands_for_its_config(run):
    config = load_config(run)
    assert (config.train.steps, config.run.dir, config.source) == (7, str(run), run / "config.yaml")
    changed = load_config(run, ["train.steps=9", "run.dir=elsewhere"])
    assert (changed.train.steps, changed.run.dir) == (9, "elsewhere")


def test_run_directory_may_be_relative(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    assert load_config("here").run.dir == "here"
    monkeypatch.chdir(run)
    assert load_config(".").run.dir == "."
    assert resolve_run_directory("") == ("", [])


def test_preset_goes_before_a_run_directory(run, monkeypatch):
    run.rename(run.parent / "quickstart")
    monkeypatch.chdir(run.parent)
    assert resolve_run_directory("quickstart") == ("quickstart", [])
    assert load_config("./../moved to/quickstart").train.steps == 7


def test_other_directories_are_not_runs(tmp_path):
    (tmp_path / "config.yaml").write_text("train: {steps: 3}\n")
    assert not is_run_directory(tmp_path)
    assert resolve_run_directory(tmp_path, ["a=1"]) == (tmp_path, ["a=1"])
    for output in ("metrics.jsonl", "provenance.json", "checkpoints"):  # each alone
        (tmp_path / output).touch()
        assert is_run_directory(tmp_path)
        (tmp_path / output).unlink()
    (tmp_path / "config.yaml").rename(tmp_path / "metrics.jsonl")
    assert not is_run_directory(tmp_path)


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/40"])
def test_checkpoint_names_its_run(name, run):
    assert run_of_checkpoint(run / name) == run
    assert [run_of_checkpoint(each) for each in (run.parent, run / "logs", run / "checkpoints/40/params")] == [None] * 3
    message = r"contains checkpoints of the run .*here\. To continue that run, give .*here;"
    with pytest.raises(ConfigError, match=message):
        load_config(run / name)
