"""A config names code beside it and what `run.allow` lists; anything else is refused before it is imported."""

import os
import subprocess
import sys

import pytest
from runs import TINY, command, environment, write_config
from spmdkit.configs import ConfigError, load_config
from spmdkit.launch.cli import main

LEAVES = "import pathlib\npathlib.Path({!r}).touch()\ndef make(**options): ...\n"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder on sys.path that is neither the config's nor the working directory; its modules leave a file."""
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
def test_code_elsewhere_is_refused(key, name, elsewhere, tmp_path):
    problem = refusal(tmp_path, f"{key}={name}")
    package = name.partition(":")[0].partition(".")[0]
    assert f"{key}={name!r} would import {package}, which is " in problem
    assert problem.startswith(f"{key}={name}: ")
    assert problem.endswith(f"""If you trust {package} with what this config says: 'run.allow=["{package}"]'.""")


@pytest.mark.parametrize("allow", ["theirs", "their_package", "their_package.inner"])
def test_what_is_listed_may_be_named(allow, elsewhere, tmp_path):
    module = "their_package.inner" if "." in allow or "_" in allow else "theirs"
    name = f"model={{name: '{module}:make'}}"
    assert load_config(write_config(tmp_path), [name, f"run.allow=[{allow}]"]).run.allow == (allow,)
    assert load_config(write_config(tmp_path, run={**TINY["run"], "allow": [allow]}), [name])


@pytest.mark.parametrize("allow", ["their", "their_package.other", "their_package.inn"])
def test_a_listed_name_is_whole(allow, elsewhere, tmp_path):
    name = "model={name: 'their_package.inner:make'}"
    problem = refusal(tmp_path, name, f"run.allow=[{allow}]")
    assert problem.endswith(f"""'run.allow=["{allow}", "their_package"]'.""")


def test_files_beside_the_config_and_in_the_working_directory(tmp_path, monkeypatch):
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


def test_run_root_moves_where_code_is(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "moved.py").write_text("")
    name = "model={name: 'moved:make'}"
    load_config(write_config(tmp_path), [f"run.root={tmp_path}/code", name])
    folder = os.path.dirname(os.__file__)
    assert "standard library" in refusal(tmp_path, f"run.root={folder}", "model={name: 'this:make'}")


def test_a_file_that_another_module_hides(tmp_path):
    (tmp_path / "optax.py").write_text("")
    problem = refusal(tmp_path, "optimizer={name: 'optax:mine'}")
    assert f"Rename {tmp_path}/optax.py, which it hides; or if you trust optax" in problem


@pytest.mark.parametrize("name", [":make", "mine:", ".mine:make", "my..own:make", ":"])
def test_malformed_names(name, tmp_path):
    assert "has to be module:function, such as my_model:make." in refusal(tmp_path, f"model={{name: '{name}'}}")


@pytest.mark.parametrize("entry", ["a:b", "*", "a/b", "", "a b", ".a"])
def test_entries_that_are_no_names(entry, tmp_path):
    assert f"run.allow: {entry!r} is no name of a module" in refusal(tmp_path, f"run.allow=['{entry}']")


@pytest.mark.parametrize("words", [["train"], ["explain"], ["verify"], ["launch", "--on", "local:2x4"]])
def test_every_command_refuses(words, tmp_path, capsys):
    model = f"model={{name: 'os:system', command: 'touch {tmp_path}/ran'}}"
    assert main([words[0], str(write_config(tmp_path)), model, *words[1:]]) == 2
    assert "model.name='os:system' would import os" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.yaml"]


def test_a_function_of_pythons_own_behind_a_module_of_the_users(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    (tmp_path / "imports_system.py").write_text("from os import system\n")
    model = f"model={{name: 'imports_system:system', command: 'touch {tmp_path}/ran'}}"
    assert main(["explain", str(write_config(tmp_path)), model]) == 2
    assert "system of Python's own: imports_system only imports it" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_what_is_listed_runs(tmp_path):
    """An optimizer of optax, named by the config itself."""
    config = write_config(
        tmp_path,
        run={**TINY["run"], "allow": ["optax"]},
        optimizer={"name": "optax:adabelief", "options": {"learning_rate": 0.01}},
    )
    ended = subprocess.run(command("explain", config), env=environment(), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_the_parts_of_a_mixture_name_code_as_well(elsewhere, tmp_path):
    parts = "[{source: 'theirs:make', weight: 1}]"
    problem = refusal(tmp_path, f"data={{source: mixture, mixture: {parts}}}")
    assert "data.mixture[0].source='theirs:make' would import theirs, which is " in problem
