"""Imports run one way, importing starts nothing, public names are described, files and functions stay short."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "mesh": set(),
    "layouts": {"mesh"},
    "parallel": {"mesh", "layouts"},
    "models": {"mesh", "layouts", "parallel"},
    "data": {"mesh", "layouts", "parallel"},
    "training": {"mesh", "layouts", "parallel", "models", "data"},
    "configs": {"mesh", "layouts", "parallel", "models", "data", "training"},
    "launch": {"mesh", "layouts", "parallel", "models", "data", "training", "configs"},
}
FILES = [path for package in (*MAY_IMPORT, "spmdkit") for path in sorted((ROOT / package).rglob("*.py"))]
MODULES = [path for path in FILES if not path.is_relative_to(ROOT / "spmdkit")]
MAX_LINES = 500
MOST_ENTRIES_OF_PARALLEL = 21
LONGEST_CHAIN_OF_PARALLEL = 12
MOST_LINES_OF_A_STRATEGY = 300
MOST_LINES_OF_A_FUNCTION = 80


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def packages_imported(path: Path) -> set[str]:
    """The packages of this project that a file imports, at its top or anywhere else."""
    found, depth = set(), len(path.relative_to(ROOT).parts)
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spmdkit"):
            found.add((node.module or "").partition(".")[2].split(".")[0] or "spmdkit")
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "spmdkit"}
    return found - {package_of(path)}


def files_imported(path: Path) -> set[Path]:
    """The files of this project that a file imports, at its top or inside a function."""
    found: set[Path] = set()
    for node in ast.walk(parse(path)):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            folder = path.parents[node.level - 1]
        elif (node.module or "").split(".")[0] == "spmdkit":
            folder = ROOT
        else:
            continue
        parts = (node.module or "").split(".")
        home = folder.joinpath(*parts[0 if node.level else 1 :])
        for target in {home, *(home / alias.name for alias in node.names)}:
            files = (target.with_suffix(".py"), target / "__init__.py")
            found |= {file for file in files if file.is_file()}
        if any((home / alias.name).with_suffix(".py").is_file() for alias in node.names):
            found.discard(home / "__init__.py")  # a file of the package, not what the package itself names
    return found - {path}


def test_no_files_import_each_other_in_a_circle():
    arrows = {path: files_imported(path) for path in FILES}
    assert sum(map(len, arrows.values())) > len(FILES), "the imports were found"
    while ends := [path for path in arrows if not arrows[path] & arrows.keys()]:
        for path in ends:
            del arrows[path]
    assert {name(path): sorted(map(name, arrows[path] & arrows.keys())) for path in arrows} == {}


def test_pipeline_schedules_import_no_jax():
    """They are data, made on the host: neither their files nor what these import know of arrays on devices."""
    reached, new = set(), set((ROOT / "parallel/schedule").glob("*.py"))
    while new:
        reached |= new
        new = {file for path in new for file in files_imported(path) if file.name != "__init__.py"} - reached
    assert ROOT / "parallel/schedule/timetable.py" in reached
    found = {name(path): modules_imported(path) & {"jax", "jaxlib", "optax"} for path in reached}
    assert {path: modules for path, modules in found.items() if modules} == {}


def modules_imported(path: Path) -> set[str]:
    """The first words of what a file imports from elsewhere."""
    nodes = list(ast.walk(parse(path)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    return {each.split(".")[0] for each in names}


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_imports_run_one_way(path):
    assert packages_imported(path) <= MAY_IMPORT[package_of(path)]


def test_importing_starts_nothing():
    """`import spmdkit` does not even import JAX; importing everything opens no device."""
    packages = ", ".join(f"spmdkit.{package}" for package in MAY_IMPORT)
    program = f"""
import sys, spmdkit
assert "jax" not in sys.modules
import {packages}
from spmdkit.mesh import backend_started
assert not backend_started()
[getattr(spmdkit, name) for name in spmdkit.__all__]
assert not backend_started()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_the_map_of_parallel_names_every_file_and_room_once():
    told = ast.get_docstring(parse(ROOT / "parallel/__init__.py")) or ""
    named = [word for line in re.findall(r"^ {4}(\S+(?: \S+)*) {3,}", told, re.MULTILINE) for word in line.split()]
    files = [path.stem for path in (ROOT / "parallel").glob("[a-z]*.py")]
    rooms = [f"{path.parent.name}/" for path in (ROOT / "parallel").glob("[a-z]*/__init__.py")]
    assert sorted(named) == sorted([*files, *rooms])
    assert len(named) + len(["__init__.py"]) <= MOST_ENTRIES_OF_PARALLEL


def test_rooms_of_parallel_go_one_way():
    """Each top file and each room is one node of a graph without circles, whose longest chain is short."""
    imports = {node: set() for node in (parallel_node(path) for path in files_of_parallel())}
    for path in files_of_parallel():
        imports[parallel_node(path)] |= nodes_imported(path) - {parallel_node(path)}
    lengths: dict[str, int] = {}
    for node in TopologicalSorter(imports).static_order():  # raises CycleError
        lengths[node] = 1 + max((lengths[other] for other in imports[node]), default=0)
    assert max(lengths.values()) <= LONGEST_CHAIN_OF_PARALLEL


def files_of_parallel() -> list[Path]:
    """The files of parallel/ but its `__init__`."""
    return [
        path
        for path in sorted((ROOT / "parallel").rglob("*.py"))
        if path.parent.name + path.name != "parallel__init__.py"
    ]


def parallel_node(path: Path) -> str:
    """The top file or the room that a file of parallel/ is or lies in."""
    return path.relative_to(ROOT / "parallel").parts[0].removesuffix(".py")


def nodes_imported(path: Path) -> set[str]:
    """The top files and rooms of parallel/ that a file there imports."""
    found, package = set(), path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            names = [each for each in base if each]
            if names == ["parallel"]:
                found |= {alias.name for alias in node.names}
            elif names[:1] == ["parallel"]:
                found.add(names[1])
    return found


def public_definitions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Public functions and classes of a module, and public methods of its public classes."""
    for node in parse(path).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        yield node.name, node
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(member, ast.FunctionDef) and not member.name.startswith("_") and not is_setter(member):
                yield f"{node.name}.{member.name}", member


def is_setter(function: ast.FunctionDef) -> bool:
    """Whether a function only sets a property, which its getter describes."""
    return any(isinstance(each, ast.Attribute) and each.attr == "setter" for each in function.decorator_list)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_what_is_public_is_described(path):
    undescribed = [each for each, node in public_definitions(path) if not ast.get_docstring(node)]
    assert undescribed == []
    assert "TODO" not in (ast.get_docstring(parse(path)) or "TODO"), "the module needs a docstring"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_and_functions_are_short(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= (MOST_LINES_OF_A_STRATEGY if package_of(path) == "parallel" else MAX_LINES)
    functions = [node for node in ast.walk(parse(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {node.name: (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions}
    assert {each: length for each, length in lengths.items() if length > MOST_LINES_OF_A_FUNCTION} == {}
