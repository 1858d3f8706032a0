"""Where the modules lie that an import would run, found without running any of them."""

import importlib
import os
import pkgutil
import site
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NamedTuple


class ModuleFile(NamedTuple):
    """A module that an import runs.

    Attributes:
        name: Dotted.
        file: Its file, links followed; None of what is built into the interpreter.
    """

    name: str
    file: Path | None

    @property
    def origin(self) -> str:
        """Whose it is, where it comes with Python or was installed, in words; else ""."""
        if self.file is None:
            return "part of Python itself"
        if self.is_installed:
            return f"an installed package ({self.file})"
        return f"part of Python's standard library ({self.file})" if self.is_pythons else ""

    @property
    def is_installed(self) -> bool:
        """Whether it lies where packages are installed."""
        return self.file is not None and (
            _is_below(self.file, INSTALLED) or bool(INSTALLED_NAMES & set(self.file.parts))
        )

    @property
    def is_pythons(self) -> bool:
        """Whether it comes with Python."""
        return self.file is None or (not self.is_installed and _is_below(self.file, STANDARD))

    @property
    def folder(self) -> Path | None:
        """The folder in which an import finds the outermost package of the name, or the module itself."""
        if self.file is None:
            return None
        depth = self.name.count(".") + (self.file.stem == "__init__")
        return self.file.parents[min(depth, len(self.file.parents) - 1)]


def _real(folders: Iterable[str | None]) -> frozenset[str]:
    return frozenset(os.path.realpath(folder) for folder in folders if folder)


STANDARD = _real(
    (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix}),
        os.path.dirname(os.__file__),
    )
)
"""Folders of the standard library."""
INSTALLED = _real(
    (
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        *getattr(site, "getsitepackages", list)(),
        getattr(site, "getusersitepackages", str)(),
    )
)
"""Folders that packages are installed to; they may lie in those of the standard library."""
INSTALLED_NAMES = {"site-packages", "dist-packages"}
"""What such folders are called in every other environment."""


def module_files(name: str, search_path: Sequence[str | Path] = ()) -> list[ModuleFile]:
    """The modules that importing one would run: the packages above it, outermost first, and the module.

    Nothing is imported. A module that is loaded already is the one that an import gives, wherever it is from.

    Args:
        name: Dotted; no part of it is empty.
        search_path: Folders that the import looks into before those of `sys.path`, as `import_named` does.

    Returns:
        What there is of them. Folders without an `__init__.py` run nothing and are left out, and so are modules that
        the program itself made in memory; it ends before the first that is not there.
    """
    importlib.invalidate_caches()
    parts, found = name.split("."), []
    within: Iterable[str] | None = None
    for number in range(1, len(parts) + 1):
        dotted = ".".join(parts[:number])
        module = sys.modules.get(dotted)
        each = _find(dotted, within, search_path) if module is None else _loaded(module)
        if each is None:
            break
        if each.file != "":
            found.append(ModuleFile(dotted, None if each.file is None else Path(os.path.realpath(each.file))))
        within = each.within
    return found


class _Found(NamedTuple):
    """A module; its file is None where it is built in, and "" where it has none."""

    file: str | None
    within: Iterable[str]


def _loaded(module: Any) -> _Found:
    """A module that is there."""
    spec = getattr(module, "__spec__", None)
    within = list(getattr(module, "__path__", ()))
    file = getattr(module, "__file__", None)
    if file is not None or spec is None:
        return _Found(file or "", within)
    return _of_spec(spec)._replace(within=within)


def _find(name: str, within: Iterable[str] | None, search_path: Sequence[str | Path]) -> _Found | None:
    """What an import of a module would find.

    Args:
        name: Dotted.
        within: The folders of the package that it is in; None of a name without dots.
        search_path: Looked into first for such a name.
    """
    own = [folder for folder in map(str, search_path) if folder not in sys.path]
    for finder in sys.meta_path:
        if finder is PathFinder:
            found = _in_folders(name, [*own, *sys.path] if within is None else within)
        else:
            spec = finder.find_spec(name, within)  # pyright: ignore[reportArgumentType]
            found = None if spec is None else _of_spec(spec)
        if found is not None:
            return found
    return None


def _in_folders(name: str, folders: Iterable[str]) -> _Found | None:
    """The module of a name in the first folder that has it; of a package without `__init__.py` all of them together.

    Python's own `PathFinder` would want the packages above it to be loaded.
    """
    parts: list[str] = []
    for folder in folders:
        finder: Any = pkgutil.get_importer(folder or os.getcwd())
        spec = None if finder is None else finder.find_spec(name)
        if spec is not None and spec.loader is not None:
            return _of_spec(spec)
        parts += [] if spec is None else list(spec.submodule_search_locations or ())
    return _Found("", parts) if parts else None


def _of_spec(spec: ModuleSpec) -> _Found:
    within = list(spec.submodule_search_locations or ())
    if spec.has_location and spec.origin:
        return _Found(spec.origin, within)
    return _Found("" if spec.loader is None else None, within)


def _is_below(file: Path, folders: frozenset[str]) -> bool:
    return any(str(parent) in folders for parent in file.parents)
