"""A config names code beside it and what `run.allow` lists; anything else is refused before it is imported."""

import os
import sys

import pytest
from spmdkit.configs import ConfigError, load_config
from support.runs import TINY, write_config

LEAVES = "import pathlib\npathlib.Path({!r}).touch()\ndef make(**options): ...\n"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An importable folder that is neither the config's nor the working directory; its modules leave a file."""
    folder = tmp_path / "elsewhere"
    (folder / "their_package").mkdir(parents=True)
    text = LEAVES.format(str(tmp_path / "imported"))
    for name in ("theirs.py", "their_package/__init__.py", "their_package/inner.py"):
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    yield folder
    assert not (tmp_path / "imported").exists()


def refusal(folder, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(write_config(folder), overrides)
    (problem,) = error.value.problems
    return problem


@pytest.mark.parametrize("key", ["model.name", "data.source", "optimizer.name", "optimizer.groups.w.name"])
@pytest.mark.parametrize("name", ["os:system", "theirs:make", "their_package.inner:make", "optax:adam", "sys:exit"])
def test_rejects_code_outside_the_project(key, name, elsewhere, tmp_path):
    problem = refusal(tmp_path, f"{key}={name}")
    package = name.partition(":")[0].partition(".")[0]
    assert f"{key}={name!r} would import {package}, which is " in problem
    assert problem.startswith(f"{key}={name}: ")
    assert problem.endswith(f"""If you trust {package} with what this config says: 'run.allow=["{package}"]'.""")


@pytest.mark.parametrize("allow", ["theirs", "their_package", "their_package.inner"])
def test_accepts_code_that_run_allow_lists(allow, elsewhere, tmp_path):
    module = "their_package.inner" if "." in allow or "_" in allow else "theirs"
    name = f"model={{name: '{module}:make'}}"
    assert load_config(write_config(tmp_path), [name, f"run.allow=[{allow}]"]).run.allow == (allow,)
    assert load_config(write_config(tmp_path, run={**TINY["run"], "allow": [allow]}), [name])


@pytest.mark.parametrize("allow", ["their", "their_package.other", "their_package.inn"])
def test_run_allow_matches_whole_names(allow, elsewhere, tmp_path):
    name = "model={name: 'their_package.inner:make'}"
    problem = refusal(tmp_path, name, f"run.allow=[{allow}]")
    assert problem.endswith(f"""'run.allow=["{allow}", "their_package"]'.""")


def test_accepts_files_beside_the_config_and_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "own" / "package").mkdir(parents=True)
    for path in ("here/mine_here.py", "own/mine_beside.py", "own/package/__init__.py", "own/package/inner.py"):
        (tmp_path / path).write_text("")
    monkeypatch.chdir(tmp_path / "here")
    config = write_config(tmp_path / "own")
    for name in ("mine_here", "mine_beside", "package", "package.inner", "there_is_no_such_module"):
        load_config(config, [f"model={{name: '{name}:make'}}"])
    (tmp_path / "own" / "upwards.py").symlink_to(tmp_path / "elsewhere.py")
    (tmp_path / "elsewhere.py").write_text("")
    assert f"would import upwards, which is {tmp_path}/elsewhere.py" in refusal(
        tmp_path / "own", "model={name: 'upwards:make'}"
    )


def test_run_root_moves_the_directory_of_code(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "moved.py").write_text("")
    name = "model={name: 'moved:make'}"
    load_config(write_config(tmp_path), [f"run.root={tmp_path}/code", name])
    folder = os.path.dirname(os.__file__)
    assert "standard library" in refusal(tmp_path, f"run.root={folder}", "model={name: 'this:make'}")


def test_names_the_file_that_another_module_hides(tmp_path):
    (tmp_path / "optax.py").write_text("")
    problem = refusal(tmp_path, "optimizer={name: 'optax:mine'}")
    assert f"Rename {tmp_path}/optax.py, which it hides; or if you trust optax" in problem


@pytest.mark.parametrize("name", [":make", "mine:", "my..own:make"])
def test_rejects_malformed_names(name, tmp_path):
    assert "must be module:function, such as my_model:make." in refusal(tmp_path, f"model={{name: '{name}'}}")


@pytest.mark.parametrize("entry", ["a:b", "a/b", ""])
def test_rejects_invalid_entries_of_run_allow(entry, tmp_path):
    assert f"run.allow: {entry!r} is not a valid module name" in refusal(tmp_path, f"run.allow=['{entry}']")


@pytest.mark.parametrize("words", [["train"], ["explain"], ["verify"], ["launch", "--on", "local:2x4"]])
def test_every_command_rejects_code_outside_the_project(words, tmp_path, cli):
    model = f"model={{name: 'os:system', command: 'touch {tmp_path}/ran'}}"
    assert "model.name='os:system' would import os" in cli(2, words[0], write_config(tmp_path), model, *words[1:]).err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.yaml"]


def test_rejects_code_outside_the_project_in_mixtures(elsewhere, tmp_path):
    parts = "[{source: 'theirs:make', weight: 1}]"
    problem = refusal(tmp_path, f"data={{source: mixture, mixture: {parts}}}")
    assert "data.mixture[0].source='theirs:make' would import theirs, which is " in problem
