import os
import statistics
import subprocess
import sys
import types

import pytest
from spmdkit.mesh import UserError
from spmdkit.parallel.model.user_code import find_foreign_code, import_named


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of user modules, forgotten afterwards."""
    imported = {**sys.modules}
    (tmp_path / "my_model.py").write_text("import my_neighbour\ndef make_model(): return my_neighbour.VALUE\n")
    (tmp_path / "my_neighbour.py").write_text("VALUE = 7\n")
    yield tmp_path
    for name in sys.modules.keys() - imported.keys():
        del sys.modules[name]  # in place: `import` does not read another dict
    sys.modules.update(imported)


def test_only_where_it_is_defined_a_standard_function_can_be_named(folder):
    (folder / "my_model.py").write_text("from statistics import mean\n")
    assert import_named("statistics:mean", "data.tokenizer") is statistics.mean
    with pytest.raises(UserError, match=r"is statistics\.mean of the standard library, which my_model only imports"):
        import_named("my_model:mean", "data.tokenizer", [folder])


def test_imports_from_the_folder_and_its_neighbours(folder):
    assert import_named("my_model:make_model", "model.name", [folder])() == 7


def test_imports_installed_packages():
    assert import_named("optax:adamw", "optimizer.name").__name__ == "adamw"


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_a_missing_backend_of_keras_is_explained(backend, folder, monkeypatch):
    """Python's own message says only that tensorflow is missing."""
    monkeypatch.setenv("KERAS_BACKEND", backend)
    monkeypatch.setitem(sys.modules, backend, None)
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    (folder / "keras").mkdir()
    (folder / "keras" / "__init__.py").write_text(f"import {backend}\n")
    (folder / "my_net.py").write_text("import keras\n")
    with pytest.raises(UserError, match=rf"\(KERAS_BACKEND={backend}\).* the environment variable KERAS_BACKEND=jax"):
        import_named("my_net:make", "model.name", [folder])


@pytest.mark.parametrize(
    ("before", "backend"),
    [("", "jax"), ("os.environ['KERAS_BACKEND'] = 'torch'", "torch"), ("sys.modules['keras'] = sys", "none")],
)
def test_keras_runs_on_jax_unless_something_else_is_set(before, backend):
    program = f"import os, sys\n{before}\nimport spmdkit\nprint(os.environ.get('KERAS_BACKEND', 'none'))"
    environment = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == backend


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = (\n", "line 1: SyntaxError: '(' was never closed"),
        ("x = 1\nx / 0\n", "line 2 (x / 0): ZeroDivisionError"),
        ("import einops2\n", "line 1 (import einops2): ModuleNotFoundError: No module named 'einops2'. Install einops"),
        ("from .my_neighbour import VALUE\n", "line 1 (from .my_neighbour import VALUE): ImportError: attempted"),
    ],
)  # fmt: skip
def test_reports_the_line_of_a_failing_module(text, message, folder):
    (folder / "broken.py").write_text(text)
    with pytest.raises(UserError) as error:
        import_named("broken:make", "model.name", [folder])
    assert str(error.value).startswith(f"model.name='broken:make': the module fails in {folder}/broken.py, {message}")


def test_reports_a_module_that_exits(folder):
    (folder / "broken.py").write_text("raise SystemExit(3)\n")
    message = r"the module exits the program while it is imported \(SystemExit: 3\)\. Move code"
    with pytest.raises(UserError, match=message):
        import_named("broken:make", "model.name", [folder])


@pytest.mark.parametrize("name", ["my_model", "my_model:", ":make", "my_model.py:make", "package/layers:make"])
def test_rejects_malformed_names(name):
    with pytest.raises(ValueError, match="must be module:function"):
        import_named(name, "model.name")


def test_rejects_a_file_hidden_by_a_loaded_module(folder):
    (folder / "optax.py").write_text("def make(): ...\n")
    with pytest.raises(ValueError, match=r"refers to .*optax.py, but a module named optax is already loaded.*Rename"):
        import_named("optax:adamw", "model.name", [folder])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_modle:make", "unknown module my_modle. Did you mean my_model? Searched {folder}"),
        ("package.layer:make", "unknown module package.layer. Did you mean package.layers? Searched "),
        ("pakage.layers:make", "unknown module pakage. Did you mean package? Searched "),
        ("my_model:make_modle", "my_model.py does not define make_modle. Did you mean make_model?"),
        ("several:make", "several.py does not define make. It defines apple."),
        ("hollow:make", "hollow does not define make"),
    ],
)
def test_proposes_the_nearest_module_or_function(name, message, folder):
    for directory in ("package", "hollow"):
        (folder / directory).mkdir()
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "layers.py").write_text("")
    (folder / "several.py").write_text("import os\nfrom pathlib import Path\nzebra = 1\ndef apple(): ...\n")
    with pytest.raises(UserError) as error:
        import_named(name, "model.name", [folder])
    assert message.format(folder=folder) in str(error.value)


def test_imports_relative_to_a_package(folder):
    (folder / "parcel").mkdir()
    (folder / "parcel" / "__init__.py").write_text("")
    (folder / "parcel" / "net.py").write_text("from .layers import make\n")
    (folder / "parcel" / "layers.py").write_text("def make(): return 5\n")
    assert import_named("parcel.net:make", "model.name", [folder])() == 5


@pytest.fixture
def unimported(tmp_path, monkeypatch):
    """Modules that would leave a file behind if they were imported."""
    text = f"open({str(tmp_path / 'imported')!r}, 'w').close()\n"
    for name in ("single.py", "package/__init__.py", "package/inner/leaf.py", "bare/leaf.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    yield tmp_path
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("name", ["single", "package.inner.leaf", "bare.leaf", "no_such_module", "package.nothing"])
def test_code_in_the_directories_is_not_foreign(name, unimported):
    assert find_foreign_code(name, [unimported]) == ""


@pytest.mark.parametrize(
    ("name", "location"),
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
def test_python_and_installed_packages_are_foreign(name, location, unimported):
    assert location in find_foreign_code(name, [unimported])
    assert "this" not in sys.modules


def test_other_directories_and_links_are_foreign(unimported, monkeypatch):
    other = unimported / "other"
    other.mkdir()
    (other / "linked.py").symlink_to(os.__file__)
    assert "standard library" in find_foreign_code("linked", [other])
    monkeypatch.syspath_prepend(str(unimported))
    assert find_foreign_code("single", [other]) == str(unimported / "single.py")
    assert find_foreign_code("bare.leaf", [other]) == str(unimported / "bare")
    (other / "single.py").write_text("")
    assert find_foreign_code("single", [other]) == "", "the given directories come first"


def test_loaded_modules_count_as_loaded(unimported, monkeypatch):
    (unimported / "subprocess.py").write_text("")
    assert "standard library" in find_foreign_code("subprocess", [unimported])
    monkeypatch.setitem(sys.modules, "made_here", types.ModuleType("made_here"))
    assert find_foreign_code("made_here", []) == ""
