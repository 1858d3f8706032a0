import os
import sys
import types
from pathlib import Path

import pytest
from spmdkit.mesh.module_files import module_files


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Modules of which each would leave a file behind if it were imported."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    left = f"open({str(tmp_path / 'imported')!r}, 'w').close()\n"
    for name in (
        "single.py",
        "package/__init__.py",
        "package/inner/__init__.py",
        "package/inner/leaf.py",
        "bare/leaf.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(left)
    yield tmp_path
    assert not (tmp_path / "imported").exists()


def found(name: str, *folders: Path) -> list[tuple[str, Path | None]]:
    return [(module.name, module.file) for module in module_files(name, folders)]


def test_a_module_in_the_search_path(folder):
    assert found("single", folder) == [("single", folder / "single.py")]
    assert module_files("single", [folder])[0].origin == ""
    assert module_files("single", [folder])[0].folder == folder


def test_the_packages_above_it_run_too(folder):
    files = [folder / "package" / name for name in ("__init__.py", "inner/__init__.py", "inner/leaf.py")]
    names = ["package", "package.inner", "package.inner.leaf"]
    assert found("package.inner.leaf", folder) == list(zip(names, files, strict=True))
    assert {module.folder for module in module_files("package.inner.leaf", [folder])} == {folder}


@pytest.mark.parametrize("depth", [1, 2])
def test_folders_without_an_init_run_nothing(depth, folder):
    if depth == 2:
        (folder / "outer").mkdir()
        (folder / "bare").rename(folder / "outer" / "bare")
    name = "bare.leaf" if depth == 1 else "outer.bare.leaf"
    (module,) = module_files(name, [folder])
    assert module.file == folder.joinpath(*name.split(".")).with_suffix(".py")
    assert module.folder == folder


def test_it_ends_before_what_is_not_there(folder):
    assert found("no_such_module", folder) == []
    assert [name for name, _ in found("package.nothing.leaf", folder)] == ["package"]


def test_the_first_folder_wins_and_all_of_them_come_before_sys_path(folder, monkeypatch):
    other = folder / "other"
    other.mkdir()
    (other / "single.py").write_text("")
    assert found("single", other, folder) == [("single", other / "single.py")]
    monkeypatch.syspath_prepend(str(folder))
    assert found("single", other) == [("single", other / "single.py")]


def test_a_link_is_where_it_leads(folder):
    (folder / "beside").mkdir()
    (folder / "beside" / "linked.py").symlink_to(os.__file__)
    (module,) = module_files("linked", [folder / "beside"])
    assert module.file == Path(os.path.realpath(os.__file__))
    assert "standard library" in module.origin


@pytest.mark.parametrize(
    ("name", "origin"),
    [
        ("sys", "part of Python itself"),
        ("posix", "part of Python itself"),
        ("os", "standard library"),
        ("subprocess", "standard library"),
        ("xml.dom.minidom", "standard library"),
        ("this", "standard library"),
        ("optax", "an installed package"),
        ("pip._internal.cli.main", "an installed package"),
    ],
)
def test_what_comes_with_python_or_was_installed(name, origin, folder):
    modules = module_files(name, [folder])
    assert modules[-1].name == name
    assert all(origin in module.origin for module in modules)
    assert ("this" in sys.modules) is False


def test_a_loaded_module_is_the_one_that_an_import_gives(folder):
    (folder / "subprocess.py").write_text("")
    assert "standard library" in module_files("subprocess", [folder])[0].origin


def test_what_the_program_made_itself_has_no_file(monkeypatch):
    monkeypatch.setitem(sys.modules, "made_here", types.ModuleType("made_here"))
    assert module_files("made_here") == []
