"""Rules for the whole library: one-way imports, no cycles, short functions, documented public names."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = [
    "mesh",
    "layouts",
    "parallel",
    "models",
    "data",
    "checkpoints",
    "training",
    "configs",
    "runtime",
    "planning",
    "report",
    "launch",
    "spmdkit",
]
"""Each package may import those above it."""
MAX_FUNCTION_LINES = 80

FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def files_imported(path: Path) -> frozenset[Path]:
    """Returns the library files that a file imports, at its top or inside a function."""
    found: set[Path] = set()
    for node in ast.walk(parse(path)):
        if not isinstance(node, ast.ImportFrom):
            continue
        is_absolute = (node.module or "").split(".")[0] == "spmdkit"
        if not node.level and not is_absolute:
            continue
        folder = path.parents[node.level - 1] if node.level else ROOT
        parts = (node.module or "").split(".")
        home = folder.joinpath(*parts[0 if node.level else 1 :])
        for target in {home, *(home / alias.name for alias in node.names)}:
            files = (target.with_suffix(".py"), target / "__init__.py")
            found |= {file for file in files if file.is_file()}
        if any((home / alias.name).with_suffix(".py").is_file() for alias in node.names):
            found.discard(home / "__init__.py")  # a file of the package, not the package itself
    return frozenset(found - {path})


def modules_imported(path: Path) -> set[str]:
    """Returns the top-level modules that a file imports from outside the library."""
    nodes = list(ast.walk(parse(path)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    return {each.split(".")[0] for each in names}


def entry(path: Path) -> str:
    """Returns the file or subpackage directly below a package that contains a file."""
    return path.relative_to(ROOT / package_of(path)).parts[0].removesuffix(".py")


@pytest.mark.slow
def test_imports_go_one_way():
    order = {package: place for place, package in enumerate(PACKAGES)}
    wrong = {
        name(path): sorted(name(target) for target in files_imported(path) if order[package_of(target)] > place)
        for path in FILES
        if (place := order[package_of(path)]) < order["spmdkit"]
    }
    assert {path: targets for path, targets in wrong.items() if targets} == {}
    assert sum(len(files_imported(path)) for path in FILES) > len(FILES), "the imports were found"


def test_files_have_no_import_cycles():
    list(TopologicalSorter({path: files_imported(path) for path in FILES}).static_order())  # raises CycleError


@pytest.mark.parametrize("package", PACKAGES)
def test_entries_of_a_package_have_no_import_cycles(package):
    """Files and subpackages can be read in an order in which each comes after those that it imports."""
    files = [path for path in FILES if package_of(path) == package and path != ROOT / package / "__init__.py"]
    imports: dict[str, set[str]] = {entry(path): set() for path in files}
    for path in files:
        targets = {entry(target) for target in files_imported(path) if package_of(target) == package}
        imports[entry(path)] |= targets - {entry(path), "__init__"}
    list(TopologicalSorter(imports).static_order())  # raises CycleError


def test_pipeline_schedules_do_not_import_jax():
    reached: set[Path] = set()
    new = set((ROOT / "parallel/schedule").glob("*.py"))
    while new:
        reached |= new
        new = {file for path in new for file in files_imported(path) if file.name != "__init__.py"} - reached
    assert ROOT / "parallel/schedule/timetable.py" in reached
    found = {name(path): modules_imported(path) & {"jax", "jaxlib", "optax"} for path in reached}
    assert {path: modules for path, modules in found.items() if modules} == {}


@pytest.mark.slow
def test_importing_starts_no_backend():
    """`import spmdkit` does not even import JAX; importing everything opens no device."""
    packages = ", ".join(f"spmdkit.{package}" for package in PACKAGES if package != "spmdkit")
    program = f"""
import importlib, pkgutil, sys, spmdkit
assert "jax" not in sys.modules
import {packages}
from spmdkit.mesh import backend_started
for package in ({packages},):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
assert not backend_started()
[getattr(spmdkit, name) for name in spmdkit.__all__]
assert not backend_started()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_docstring_of_parallel_lists_every_entry():
    text = ast.get_docstring(parse(ROOT / "parallel/__init__.py")) or ""
    listed = [word for line in re.findall(r"^ {4}(\S+(?: \S+)*) {3,}", text, re.MULTILINE) for word in line.split()]
    files = [path.stem for path in (ROOT / "parallel").glob("[a-z]*.py")]
    packages = [f"{path.parent.name}/" for path in (ROOT / "parallel").glob("[a-z]*/__init__.py")]
    assert sorted(listed) == sorted([*files, *packages])


def public_definitions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Yields the public functions and classes of a module, and the public methods of its public classes."""
    for node in parse(path).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        yield node.name, node
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(member, ast.FunctionDef) and not member.name.startswith("_") and not is_setter(member):
                yield f"{node.name}.{member.name}", member


def is_setter(function: ast.FunctionDef) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr == "setter" for each in function.decorator_list)


def test_public_names_have_docstrings():
    missing = {name(path): [] for path in FILES if not ast.get_docstring(parse(path))}
    for path in FILES:
        undocumented = [each for each, node in public_definitions(path) if not ast.get_docstring(node)]
        if undocumented:
            missing[name(path)] = undocumented
    assert missing == {}


@pytest.mark.slow
def test_docstrings_do_not_begin_with_a_question_word():
    question = re.compile(r"(What|Whether|How|Where|Which|Who|Whose|Why|Whom) ")
    nodes = [
        (path, node)
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
    ]
    wrong = [f"{name(path)}: {text}" for path, node in nodes if question.match(text := ast.get_docstring(node) or "")]
    assert len(wrong) <= 0.02 * len(nodes), wrong


@pytest.mark.slow
def test_functions_are_short():
    too_long = {}
    for path in FILES:
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                too_long[f"{name(path)}: {node.name}"] = lines
    assert too_long == {}
