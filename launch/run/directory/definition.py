"""What the user's own model or optimizer is: a hash of the program that it traces to, and of the source it comes from.

What it *computes* is what counts: it is traced, and the text of the trace hashed, so that a changed comment changes
nothing, while a changed activation, which changes no shape, does.
"""

import ast
import hashlib
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ....data.source import fingerprint

NO_MATTER = re.compile(r"\b0x[0-9a-f]+|\b(?:name|fwd|bwd|jvp)=(?:<lambda>|\w+)")
"""What a trace shows of functions besides what they compute: their addresses and names."""


class Definition(NamedTuple):
    """What the user's own `module:function` is; empty for what comes with spmdkit.

    Attributes:
        name: as the config names it.
        program: hash of what it computes, as JAX traces it; "" where that is not known.
        files: module -> path and hash of its source: the module, and those beside it that it imports.
    """

    name: str
    program: str = ""
    files: Mapping[str, tuple[str, str]] = {}


def changed_files(before: Definition, now: Definition) -> str:
    """The files whose source differs, with their verb; "" where there is none."""
    names = [*now.files, *(name for name in before.files if name not in now.files)]
    hashes = [{name: hashed for name, (_, hashed) in each.files.items()} for each in (before, now)]
    paths = [{**before.files, **now.files}[name][0] for name in names if hashes[0].get(name) != hashes[1].get(name)]
    return f"{', '.join(paths)} {'has' if len(paths) == 1 else 'have'}" if paths else ""


def definition(name: str, trace: Callable[[], Any]) -> Definition:
    """The definition of what a config names; nothing is traced for what comes with spmdkit."""
    if ":" not in name:
        return Definition(name)
    return Definition(name, _program(trace), dict(sources(name.partition(":")[0])))


def _program(trace: Callable[[], Any]) -> str:
    """A hash of the program that a function traces to, with its constants."""
    try:
        traced = trace()
        text = traced.jaxpr.pretty_print(use_color=False)
        return fingerprint([np.asarray(each) for each in traced.consts], NO_MATTER.sub("", text))
    except Exception:  # the user's code; whatever it cannot do is told when the step is built, not here
        return ""


def sources(name: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Module -> path and hash of its source, for a module and what it imports from beside it."""
    found: dict[str, Path] = {}
    waiting, top = [name], name.partition(".")[0]
    folder = _folder(sys.modules.get(top))
    while waiting:
        module_name = waiting.pop()
        path = _file(sys.modules.get(module_name))
        if module_name in found or path is None or folder is None or folder not in path.parents:
            continue
        if _installed(path) and module_name.partition(".")[0] != top:
            continue
        found[module_name] = path
        waiting += _imports(sys.modules[module_name], path)
    for module_name, path in sorted(found.items()):
        yield module_name, (str(path), hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest())


def _imports(module: ModuleType, path: Path) -> Iterator[str]:
    """The names of modules that a module's source may import, anywhere in it, with those of their packages."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module.__package__ or None
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _folder(module: ModuleType | None) -> Path | None:
    """The folder in which a module or package stands."""
    path = _file(module)
    if path is None:
        return None
    return path.parent.parent if path.name == "__init__.py" else path.parent


def _file(module: ModuleType | None) -> Path | None:
    """The source of a module, where it has one."""
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file and file.endswith(".py") and Path(file).is_file() else None


def _installed(path: Path) -> bool:
    """Whether a file belongs to an installed package or to Python itself."""
    return any(Path(sysconfig.get_paths()[name]).resolve() in path.parents for name in ("purelib", "platlib", "stdlib"))
