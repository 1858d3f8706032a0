import os
import subprocess
import sys

import pytest
from spmdkit.mesh import UserError
from spmdkit.mesh.user_code import import_named
from spmdkit.mesh.user_options import call_with_options


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of user modules, forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    (tmp_path / "my_model.py").write_text("import my_neighbour\ndef make_model(): return my_neighbour.VALUE\n")
    (tmp_path / "my_neighbour.py").write_text("VALUE = 7\n")
    return tmp_path


def test_imports_from_the_folder_and_its_neighbours(folder):
    assert import_named("my_model:make_model", "model.name", [folder])() == 7


def test_imports_installed_packages():
    assert import_named("optax:adamw", "optimizer.name").__name__ == "adamw"


def test_no_such_module_says_where_it_looked(folder):
    with pytest.raises(ValueError, match=r"model.name='my_modle:make'") as error:
        import_named("my_modle:make", "model.name", [folder])
    assert f"there is no module my_modle. Did you mean my_model? Looked in {folder}" in str(error.value)


def test_a_missing_backend_of_keras_is_explained(folder, monkeypatch):
    """Python's own message says only that tensorflow is missing."""
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    (folder / "keras").mkdir()
    (folder / "keras" / "__init__.py").write_text("import tensorflow\n")
    (folder / "my_net.py").write_text("import keras\n")
    with pytest.raises(
        UserError, match=r"\(KERAS_BACKEND=tensorflow\).*set the environment variable KERAS_BACKEND=jax"
    ):
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


def test_a_missing_import_inside_the_module_is_not_hidden(folder):
    (folder / "broken.py").write_text("import a_package_not_installed\n")
    with pytest.raises(UserError, match="a_package_not_installed") as error:
        import_named("broken:make", "model.name", [folder])
    assert isinstance(error.value.__cause__, ModuleNotFoundError)
    place = f"in {folder}/broken.py, line 1 (import a_package_not_installed): ModuleNotFoundError"
    assert str(error.value).startswith(f"model.name='broken:make': the module fails {place}")


@pytest.mark.parametrize(
    ("text", "told"),
    [("x = (\n", "line 1: SyntaxError: '(' was never closed"), ("x = 1\nx / 0\n", "line 2 (x / 0): ZeroDivisionError")],
)
def test_a_module_that_cannot_be_imported(text, told, folder):
    (folder / "broken.py").write_text(text)
    with pytest.raises(UserError) as error:
        import_named("broken:make", "model.name", [folder])
    assert f"the module fails in {folder}/broken.py, {told}" in str(error.value)


def test_a_function_that_raises_is_told_with_its_line(folder):
    (folder / "raising.py").write_text("def make(width):\n    return [0][width]\n")
    function = import_named("raising:make", "model.name", [folder])
    with pytest.raises(UserError) as error:
        call_with_options(function, {"width": 3}, {}, "model", "model.name='raising:make'")
    place = f"in {folder}/raising.py, line 2 (return [0][width])"
    assert str(error.value) == f"model.name='raising:make' fails {place}: IndexError: list index out of range"


def test_no_such_function_names_the_nearest(folder):
    with pytest.raises(ValueError, match=r"my_model.py holds no make_modle\. Did you mean make_model\?"):
        import_named("my_model:make_modle", "model.name", [folder])


@pytest.mark.parametrize("name", ["my_model", "my_model:", ":make"])
def test_malformed_names(name):
    with pytest.raises(ValueError, match="has to be module:function"):
        import_named(name, "model.name")


def test_a_file_hidden_by_another_module_is_refused(folder):
    (folder / "optax.py").write_text("def make(): ...\n")
    with pytest.raises(ValueError, match=r"means .*optax.py, but a module named optax is already loaded.*Rename"):
        import_named("optax:adamw", "model.name", [folder])


def test_a_typo_names_the_nearest_file_beside_it(folder):
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "layers.py").write_text("")

    def told(name):
        with pytest.raises(UserError) as error:
            import_named(name, "model.name", [folder])
        return str(error.value)

    assert "there is no module my_modl. Did you mean my_model? Looked in " in told("my_modl:make")
    assert "there is no module package.layer. Did you mean package.layers? Looked in " in told("package.layer:make")
    assert "there is no module pakage. Did you mean package? Looked in " in told("pakage.layers:make")
    assert "there is no module my_neighbour.py. Write the name of the module without .py: my_neighbour. " in told(
        "my_neighbour.py:make"
    )
    assert "there is no module package/layers. Write package.layers: a dot parts the names" in told("package/layers:x")


def test_what_a_module_holds_is_listed_without_the_modules_it_imports(folder):
    (folder / "several.py").write_text("import os\nfrom pathlib import Path\nzebra = 1\ndef apple(): ...\n")
    with pytest.raises(UserError, match=r"several.py holds no make. It defines apple, Path, zebra\.$"):
        import_named("several:make", "model.name", [folder])
    (folder / "hollow").mkdir()
    with pytest.raises(UserError, match=r"the folder .*hollow holds no make"):
        import_named("hollow:make", "model.name", [folder])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("from .my_neighbour import VALUE\n", "write the import without the dot, or put the files into a folder"),
        ("import my_neighbor\n", "No module named 'my_neighbor'. Did you mean my_neighbour? Install my_neighbor for"),
        ("import einops2\n", "No module named 'einops2'. Install einops2 for "),
        ("raise SystemExit(3)\n", "the module ends the program while it is imported (SystemExit: 3). Keep what runs"),
    ],
)
def test_what_to_do_about_an_import_that_fails(text, told, folder):
    (folder / "broken.py").write_text(text)
    with pytest.raises(UserError) as error:
        import_named("broken:make", "model.name", [folder])
    assert told in str(error.value)


def test_a_package_may_import_from_itself(folder):
    (folder / "parcel").mkdir()
    (folder / "parcel" / "__init__.py").write_text("")
    (folder / "parcel" / "net.py").write_text("from .layers import make\n")
    (folder / "parcel" / "layers.py").write_text("def make(): return 5\n")
    assert import_named("parcel.net:make", "model.name", [folder])() == 5
