"""Relative paths in a YAML file start from its directory, those in overrides from the working directory."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import pytest
import yaml
from spmdkit.configs import load_config, resolved_yaml
from spmdkit.configs.key_names import sections
from spmdkit.configs.schema import Config
from spmdkit.configs.validation import to_dataclass
from spmdkit.data import DataConfig, open_splits
from spmdkit.launch.remote.hosts import Host, HostsFile
from spmdkit.mesh.errors import UserError
from spmdkit.models import hugging_face
from spmdkit.models.catalog import MODELS
from spmdkit.models.lora import LoRAConfig
from spmdkit.parallel.schedule.csv_file import read_schedule
from spmdkit.parallel.sharding.strategies import option_types
from spmdkit.runtime.build_run import strategy_from_root
from spmdkit.training.callbacks.callback_catalog import CALLBACKS

import spmdkit


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


# URLs

URL = "s3://bucket/x"
PATHS = {
    "run.dir",
    "run.root",
    "run.cache",
    "data.files",
    "data.eval_files",
    "data.tokenizer",
    "checkpoint.start_from",
    "launch.python",
    "launch.kubernetes.mount",
    "strategy.pipe.schedule",
    "model.folder",
    "callbacks.path",
    "hosts.python",
    "hosts.directory",
}
NOT_PATHS = {
    "callbacks.after",
    "callbacks.monitor",
    "checkpoint.start_fresh",
    "data.source",
    "hosts.address",
    "hosts.name",
    "callbacks.experiment",
    "callbacks.project",
    "callbacks.prompt",
    "callbacks.run_name",
    "callbacks.tracking_uri",
    "data.column",
    "data.columns",
    "launch.kubernetes.image",
    "launch.kubernetes.memory",
    "launch.kubernetes.name",
    "launch.kubernetes.namespace",
    "launch.kubernetes.queue",
    "launch.kubernetes.secrets",
    "launch.kubernetes.service_account",
    "launch.kubernetes.volume_claim",
    "launch.elastic",
    "launch.mpi.options",
    "launch.prefix",
    "launch.setup",
    "launch.slurm.account",
    "launch.slurm.qos",
    "hosts.ssh",
    "model.ignore_keys",
    "model.match",
    "model.train",
    "optimizer.decay_skip",
    "optimizer.freeze",
    "optimizer.muon_skip",
    "optimizer.name",
    "sample.prompt",
}
"""Keys with any text, which may contain a URL: names, images, addresses of servers, regular expressions, commands."""


def text_keys(section: str, cls: type) -> Iterator[tuple[str, type, str, object]]:
    """Yields (key, class, name, URL) of every key of a section that is a text or a list of texts."""
    hints = get_type_hints(cls)
    for field in fields(cls):
        hint = hints[field.name]
        if not field.init:
            continue
        if is_dataclass(hint):
            yield from text_keys(f"{section}.{field.name}", hint)
        elif hint is str:
            yield f"{section}.{field.name}", cls, field.name, URL
        elif get_origin(hint) is tuple and str in get_args(hint):
            yield f"{section}.{field.name}", cls, field.name, [URL]


def all_text_keys() -> Iterator[tuple[str, type, str, object]]:
    defaults = Config()
    for section in sections():
        if is_dataclass(getattr(defaults, section)):
            yield from text_keys(section, type(getattr(defaults, section)))
    for strategy, options in option_types().items():
        yield from text_keys(f"strategy.{strategy}", options)
    for options, _ in MODELS.values():
        yield from text_keys("model", options)
    yield from text_keys("model", LoRAConfig)
    for callback in CALLBACKS.values():
        yield from text_keys("callbacks", callback)
    yield from text_keys("hosts", Host)
    yield from text_keys("hosts", HostsFile)


def test_every_key_of_a_path_rejects_urls():
    """A new key with a text is a path, whose type is LocalPath, or it is listed in NOT_PATHS."""
    rejected, accepted = set(), set()
    for key, cls, name, url in all_text_keys():
        problems = []
        to_dataclass(cls, {name: url}, key.rpartition(".")[0], problems)
        messages = [problem.message for problem in problems if problem.path.endswith(name)]
        if not messages:
            accepted.add(key)
        elif any("file system" in message for message in messages):
            rejected.add(key)
    assert rejected == PATHS
    assert accepted <= NOT_PATHS


def test_overrides_and_parts_of_a_mixture_reject_urls(project):
    part = "{source: text, weight: 1, files: ['gs://bucket/*.txt']}"
    words = [
        "run.root=gs://bucket",
        "data.tokenizer=hf:org/name",
        "model={name: hugging_face, folder: 'hf://org/name'}",
    ]
    for word in [*words, f"data={{source: mixture, mixture: [{part}], length: 8}}"]:
        with pytest.raises(UserError, match=r"on a mounted file system \(URLs are not supported"):
            load_config("configs/my.yaml", [word], sizes=False)


def test_functions_reject_urls():
    for function in (hugging_face.load, spmdkit.load_run, load_config, read_schedule):
        with pytest.raises(UserError, match="must be a path on a mounted file system"):
            function(URL)
    with pytest.raises(UserError, match="must be a path on a mounted file system"):
        spmdkit.Checkpoints(URL, keep=1, abstract_state=None)
    with pytest.raises(UserError, match=r"data.files must contain paths on a mounted file system"):
        DataConfig(source="text", files=(URL,))
