"""spmdkit in the root of a clone, where `spmdkit/` is found before any installed copy."""

import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parents[1]
NOT_IN_A_CLONE = shutil.ignore_patterns(".*", "runs", "build", "dist", "tests", "docs", "*.egg-info", "__pycache__")
USES = {
    "import": ("-c", "import spmdkit; print(spmdkit.DeviceMesh, spmdkit.load_config)"),
    "subpackage": ("-c", "from spmdkit.layouts import LayoutMap; print(LayoutMap)"),
    "module": ("-m", "spmdkit", "train", "--list"),
}


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("clone") / "spmdkit", ignore=NOT_IN_A_CLONE)


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """A fresh environment without spmdkit that finds the packages that this environment has."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (packages / "borrowed.pth").write_text(str(Path(jax.__file__).parents[1]))
    return folder / "bin" / "python"


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow_cases("import", "module", "subpackage")
@pytest.mark.parametrize("use", USES)
def test_works_in_a_clone_that_is_not_installed(use, clone, python):
    assert run(python, *USES[use], cwd=clone)


@pytest.mark.long
@pytest.mark.slow
def test_works_in_a_clone_with_an_installed_copy(clone, python):
    run(python, "-m", "ensurepip", cwd=clone)
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", ".", cwd=clone)
    for use in USES.values():
        assert run(python, *use, cwd=clone)
    where = run(python, "-c", "import spmdkit.mesh; print(spmdkit.mesh.__file__)", cwd=clone.parent)
    assert Path(where.strip()).is_relative_to(python.parent.parent), "outside the clone, the installed copy is used"
