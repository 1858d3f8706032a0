"""Imports the objects that a config names as `module:function`, and finds where their code is."""

import importlib
import os
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

from ...mesh.errors import UserError, did_you_mean
from .user_errors import PACKAGES, OwnCodeError, as_user_error

KERAS_BACKENDS = ("tensorflow", "torch")
"""The packages of Keras backends other than JAX."""


def import_named(name: str, key: str, search_path: Sequence[str | Path] = ()) -> Any:
    """Imports the object of `module:function`.

    Args:
        name: For example "my_model:make" or "package.module:make".
        key: The config key with this value, for messages.
        search_path: Directories that are searched before the installed packages. They stay on `sys.path`, so that the
            module can import its neighbors later too.

    Raises:
        UserError: The name is malformed; the module is missing, raises an error, or has the name of another module; or
            the function is missing or belongs to the standard library.
    """
    module_name, _, attribute = name.partition(":")
    given = f"{key}={name!r}"
    if not attribute or not all(module_name.split(".")) or "/" in name or module_name.endswith(".py"):
        raise UserError(f"{given} must be module:function, such as my_model:make, or package.module:make.")
    sys.path[:0] = [folder for folder in map(str, search_path) if folder not in sys.path]
    module = _import(module_name, given)
    _check_file(module, module_name, given, search_path)
    try:
        found = pkgutil.resolve_name(name)
    except AttributeError:
        file = getattr(module, "__file__", None) or f"the directory {', '.join(getattr(module, '__path__', []))}"
        near = did_you_mean(attribute, _defined(module), otherwise="It defines")
        raise UserError(f"{given}: {file} does not define {attribute}.{near}") from None
    home = getattr(found, "__module__", None) or ""
    if isinstance(found, FunctionType | BuiltinFunctionType | type) and _is_standard(home) > _is_standard(module_name):
        raise UserError(
            f"{given} is {home}.{found.__qualname__} of the standard library, which {module_name} only imports. Name a "
            "function of your own code."
        )
    return found


def import_function(name: str, key: str, search_path: Sequence[str | Path] = ()) -> Callable[..., Any]:
    """Imports the function of `module:function`; see `import_named`.

    Raises:
        UserError: See `import_named`, or the object is not a function.
    """
    function = import_named(name, key, search_path)
    if not callable(function):
        raise UserError(f"{key}={name!r} is a {type(function).__name__}, not a function.")
    return function


def find_foreign_code(module_name: str, folders: Sequence[str | Path]) -> str:
    """Returns the location of a module's code if it is outside some directories, otherwise "". Imports nothing.

    The location is that of the outermost package. The standard library and installed packages are always outside.

    Args:
        module_name: The dotted name.
        folders: The directories, which are searched before `sys.path`, as in `import_named`.
    """
    package = module_name.partition(".")[0]
    loaded = sys.modules.get(package)
    if loaded is None:
        importlib.invalidate_caches()
        spec = _find_spec(package, [*map(str, folders), *sys.path])
    else:
        spec = getattr(loaded, "__spec__", None)
    file = getattr(loaded, "__file__", None) or (spec.origin if spec and spec.has_location else None)
    files = [file] if file else list((spec and spec.submodule_search_locations) or ())
    if not files:  # built in; missing, which the import reports; or created by the program itself
        return "part of Python itself" if spec else ""
    standard = os.path.realpath(sysconfig.get_path("stdlib"))
    own = {os.path.realpath(folder) for folder in folders}
    for path in map(Path, map(os.path.realpath, files)):
        if PACKAGES & set(path.parts):
            return f"an installed package ({path})"
        if path.is_relative_to(standard):
            return f"part of Python's standard library ({path})"
        if str(path.parents[path.stem == "__init__"]) not in own:
            return str(path)
    return ""


def _find_spec(package: str, folders: Sequence[str]) -> ModuleSpec | None:
    specs = (finder.find_spec(package, folders if finder is PathFinder else None) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)


def _is_standard(module_name: str) -> bool:
    return module_name.partition(".")[0] in sys.stdlib_module_names


def _defined(module: Any) -> list[str]:
    """Returns the names of the functions and classes that a module itself defines."""
    return [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]


def _import(module_name: str, given: str) -> Any:
    def is_missing(error: Exception) -> bool:
        """Returns True if the module itself, or a package that contains it, is missing."""
        return isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")

    importlib.invalidate_caches()
    try:
        with as_user_error(f"{given}: the module", passes=is_missing):
            return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(_missing_module(str(error.name), given)) from None
    except SystemExit as error:
        raise UserError(
            f"{given}: the module exits the program while it is imported (SystemExit: {error}). Move code that runs, "
            'such as parsing arguments, below `if __name__ == "__main__":`.'
        ) from None
    except UserError as error:
        if remedy := _remedy(error.__cause__):
            raise OwnCodeError(f"{error}. {remedy}") from error.__cause__
        raise


def _missing_module(name: str, given: str) -> str:
    """Returns the message for a missing module, with the searched directories and the nearest name."""
    above, _, last = name.rpartition(".")
    own = [folder for folder in sys.path if not folder.startswith((sys.prefix, sys.base_prefix))]
    folders = list(getattr(sys.modules.get(above), "__path__", own))
    modules = [each.name for each in pkgutil.iter_modules(folders)]
    hint = did_you_mean(last, modules, prefix=f"{above}." if above else "")
    searched = ", ".join(dict.fromkeys(str(Path(folder).resolve()) for folder in folders))
    return f"{given}: unknown module {name}.{hint} Searched {searched}{'' if above else ' and installed packages'}."


def _remedy(error: BaseException | None) -> str:
    """Returns the fix for some errors of an import, or ""."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    frames = traceback.walk_tb(error.__traceback__)
    packages = {str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in frames}
    if error.name in KERAS_BACKENDS and "keras" in packages:
        backend = os.environ.get("KERAS_BACKEND", "")
        return (
            f"Keras uses its {error.name} backend here (KERAS_BACKEND={backend}), and only modules of its JAX backend "
            "can be trained: set the environment variable KERAS_BACKEND=jax."
        )
    package = error.name.partition(".")[0]
    return f"Install {package} for {sys.executable}, or put its file next to the module."


def _check_file(module: Any, module_name: str, given: str, search_path: Sequence[str | Path]) -> None:
    """Raises UserError if the user's file has the name of a module that is already loaded from another file."""
    stems = [Path(folder).joinpath(*module_name.split(".")) for folder in search_path]
    files = [file for stem in stems for file in (stem.with_suffix(".py"), stem / "__init__.py") if file.is_file()]
    loaded = getattr(module, "__file__", None)
    if files and (loaded is None or not files[0].samefile(loaded)):
        raise UserError(
            f"{given} refers to {files[0].resolve()}, but a module named {module_name} is already loaded from "
            f"{loaded or 'the interpreter itself'}. Rename your file."
        )
