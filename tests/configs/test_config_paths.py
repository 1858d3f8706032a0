"""Relative paths in a YAML file start from its directory, those in overrides from the working directory."""

from pathlib import Path

import pytest
import yaml
from spmdkit.configs import load_config, resolved_yaml
from spmdkit.data import open_splits
from spmdkit.mesh.errors import UserError
from spmdkit.runtime.build_run import strategy_from_root


def with_root(config):
    return strategy_from_root(config.strategy, config.run.root)


TEXT = "the mesh has axes; " * 40
PIPE = "strategy: {pipe: {size: 2, schedule: mine.csv}}\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Returns a project with a config and a corpus in configs/; its root is the working directory."""
    (tmp_path / "configs" / "corpus").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    (tmp_path / "configs" / "corpus" / "beside.txt").write_text(TEXT)
    (tmp_path / "here" / "here.txt").write_text(TEXT * 2)
    (tmp_path / "configs" / "my.yaml").write_text("data: {source: text, length: 8, files: ['corpus/*.txt']}\n" + PIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def num_bytes(config) -> int:
    return sum(len(part or ()) for part in open_splits(config.data, config.run.search_path)[:2])


def test_paths_in_a_file_start_from_its_directory(project, monkeypatch):
    from_above = load_config("configs/my.yaml")
    monkeypatch.chdir("here")
    from_elsewhere = load_config("../configs/my.yaml")
    assert from_above.data.files == from_elsewhere.data.files == ("corpus/*.txt",)
    assert num_bytes(from_above) == num_bytes(from_elsewhere) > 0
    for config in (from_above, from_elsewhere):
        assert config.run.search_path[0].samefile(project / "configs")
        assert Path(with_root(config)["pipe"].schedule).resolve() == project / "configs" / "mine.csv"


def test_paths_in_overrides_start_from_the_working_directory(project):
    config = load_config("configs/my.yaml", ["data.files=['here/*.txt']", "strategy.pipe.schedule=here/mine.csv"])
    assert config.data.files == (str(project / "here" / "*.txt"),)
    assert with_root(config)["pipe"].schedule == str(project / "here" / "mine.csv")
    assert num_bytes(config) > num_bytes(load_config("configs/my.yaml"))


@pytest.mark.parametrize("override", ["data={source: text, files: [here/*.txt]}", "data.eval_files=[here/*.txt]"])
def test_overrides_of_mappings_start_from_the_working_directory(project, override):
    config = load_config("configs/my.yaml", [override])
    assert str(project / "here" / "*.txt") in (*config.data.files, *config.data.eval_files)


def test_schedule_names_are_not_paths(project):
    config = load_config("configs/my.yaml", ["strategy.pipe.schedule=zb_h1"])
    assert config.strategy["pipe"].schedule == with_root(config)["pipe"].schedule == "zb_h1"


def test_paths_with_a_preset_start_from_the_working_directory(project):
    config = load_config("quickstart", ["data={source: text, files: ['here/*.txt'], length: 8}"])
    assert config.run.root == str(project)
    assert config.data.files == ("here/*.txt",)
    assert num_bytes(config) > 0


def test_config_of_a_run_works_from_any_directory(project, monkeypatch):
    config = load_config("configs/my.yaml")
    (project / "runs" / "my").mkdir(parents=True)
    written = project / "runs" / "my" / "config.yaml"
    written.write_text(resolved_yaml(config))
    monkeypatch.chdir("here")
    again = load_config(written)
    assert again == config
    assert num_bytes(again) == num_bytes(config)


def test_root_overrides_the_directory(project):
    text = yaml.safe_load((project / "configs" / "my.yaml").read_text())
    (project / "configs" / "other.yaml").write_text(yaml.safe_dump({**text, "run": {"root": "../here"}}))
    assert load_config("configs/other.yaml").run.root.endswith("configs/../here")
    assert load_config("configs/my.yaml", ["run.root=here"]).run.root == str(project / "here")


def test_error_names_the_directory(project):
    config = load_config("configs/my.yaml", [])
    (project / "configs" / "corpus" / "beside.txt").unlink()
    with pytest.raises(UserError) as info:
        open_splits(config.data, config.run.search_path)
    assert f"no file matches '{project}/configs/corpus/*.txt'" in str(info.value)
    assert "Paths in a YAML file start from its directory (run.root)" in str(info.value)


def test_parts_of_a_mixture_follow_the_same_rule(project):
    parts = "[{source: text, files: [here/*.txt], weight: 1}]"
    given = load_config("configs/my.yaml", ["data.source=mixture", "data.files=[]", f"data.mixture={parts}"])
    assert given.data.mixture[0].files == (str(project / "here" / "*.txt"),)
    assert num_bytes(given)
