"""What a config names as `module:function`: found and imported, or what is near to it."""

import importlib
import importlib.util
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from .errors import UserError
from .module_files import module_files
from .near_miss import did_you_mean, nearest
from .user_errors import OwnCodeError, told_as_users

KERAS_BACKENDS = ("tensorflow", "torch")
"""The packages of Keras's other backends."""


def import_named(name: str, key: str, search_path: Sequence[str | Path] = ()) -> Any:
    """Imports the object that `module:function` names.

    Args:
        name: For example "my_model:make" or "package.module:make".
        key: The config key it stands under, for messages.
        search_path: Folders looked in before the installed packages. They stay on `sys.path`, so that the module can
            import its neighbours later too.

    Returns:
        The object.

    Raises:
        UserError: The name is malformed, there is no such module, it raises something while it is imported, another
            module already has its name, or it holds no such function, with the nearest that it holds; or what it holds
            is a function of Python's own.
    """
    module_name, _, attribute = name.partition(":")
    if not attribute or not all(module_name.split(".")):
        raise UserError(f"{key}={name!r} has to be module:function, such as my_model:make.")
    sys.path[:0] = [folder for folder in map(str, search_path) if folder not in sys.path]
    module = _import(module_name, f"{key}={name!r}", search_path)
    if not hasattr(module, attribute):
        file = getattr(module, "__file__", None) or f"the folder {', '.join(getattr(module, '__path__', []))}"
        near = did_you_mean(attribute, _defined(module), otherwise="It defines")
        raise UserError(f"{key}={name!r}: {file} holds no {attribute}.{near}")
    found = getattr(module, attribute)
    _check_own(found, module_name, f"{key}={name!r}")
    return found


def _check_own(found: Any, module_name: str, given: str) -> None:
    """Refuses a function of Python's own that a module has only imported: options would become its arguments."""
    home = getattr(found, "__module__", None)
    if not isinstance(found, FunctionType | BuiltinFunctionType | type) or not home or home == module_name:
        return
    if _is_pythons(home) and not _is_pythons(module_name):
        raise UserError(
            f"{given} is {home}.{found.__qualname__} of Python's own: {module_name} only imports it. Name a function "
            "that you have written."
        )


def _is_pythons(module_name: str) -> bool:
    return any(module.is_pythons for module in module_files(module_name)[-1:])


def import_function(name: str, key: str, search_path: Sequence[str | Path] = ()) -> Callable[..., Any]:
    """Imports the function that `module:function` names; see `import_named`.

    Raises:
        UserError: As `import_named`, or what is named is no function.
    """
    function = import_named(name, key, search_path)
    if not callable(function):
        raise UserError(f"{key}={name!r} is a {type(function).__name__}, not a function.")
    return function


def _defined(module: Any) -> list[str]:
    """The names that a module itself defines, then those that it imports from others."""
    public = [name for name, value in vars(module).items() if name[0] != "_" and not isinstance(value, ModuleType)]
    return sorted(public, key=lambda name: getattr(vars(module)[name], "__module__", None) != module.__name__)


def _import(module_name: str, given: str, search_path: Sequence[str | Path]) -> Any:
    importlib.invalidate_caches()
    try:
        with told_as_users(f"{given}: the module", passes=lambda error: _is_missing(error, module_name)):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(_not_there(str(error.name), given)) from None
    except SystemExit as error:
        raise UserError(
            f"{given}: the module ends the program while it is imported (SystemExit: {error}). Keep what runs, such as "
            'reading arguments, below `if __name__ == "__main__":`.'
        ) from None
    except UserError as error:
        if remedy := _remedy(error.__cause__, module_name):
            raise OwnCodeError(f"{error}. {remedy}") from error.__cause__
        raise
    _check_not_shadowed(module, module_name, given, search_path)
    return module


def _not_there(name: str, given: str) -> str:
    """Says that there is no module of a name, where it was looked for, and which is near to it.

    Args:
        name: Dotted; the packages above it are there.
        given: The config key with its value.
    """
    above, _, last = name.rpartition(".")
    folders = list(getattr(sys.modules.get(above), "__path__", _own_folders()))
    near = nearest(last, [each.name for each in pkgutil.iter_modules(folders)])
    hint = f" Did you mean {f'{above}.{near[0]}' if above else near[0]}?" if near else ""
    if last == "py" and above:
        hint = f" Write the name of the module without .py: {above}."
    elif "/" in name:
        hint = f" Write {name.removesuffix('.py').strip('/').replace('/', '.')}: a dot parts the names of folders."
    searched = ", ".join(dict.fromkeys(str(Path(folder).resolve()) for folder in folders))
    installed = "" if above else " and the installed packages"
    return f"{given}: there is no module {name}.{hint} Looked in {searched}{installed}."


def _own_folders() -> list[str]:
    """Where modules are looked for, but for what was installed."""
    return [folder for folder in sys.path if not folder.startswith((sys.prefix, sys.base_prefix))]


def _remedy(error: BaseException | None, module_name: str) -> str:
    """What to do about some errors of an import."""
    if isinstance(error, ModuleNotFoundError) and error.name in KERAS_BACKENDS and _is_raised_in(error, "keras"):
        backend = os.environ.get("KERAS_BACKEND", "")
        return (
            f"Keras runs on its {error.name} backend here (KERAS_BACKEND={backend}), and only modules of its JAX "
            "backend can be trained: set the environment variable KERAS_BACKEND=jax."
        )
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        near = did_you_mean(package, [each.name for each in pkgutil.iter_modules(_own_folders())], cutoff=0.75)
        return f"{near} Install {package} for {sys.executable}, or put its file beside the module.".lstrip()
    if isinstance(error, ImportError) and "no known parent package" in str(error):
        return (
            f"{module_name} is no part of a package, so it cannot import relative to one: write the import without the "
            "dot, or put the files into a folder and name it as folder.module:function."
        )
    return ""


def _is_raised_in(error: Exception, package: str) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(str(frame.f_globals.get("__name__")).partition(".")[0] == package for frame, _ in frames)


def _is_missing(error: Exception, module_name: str) -> bool:
    """Whether the module itself, or the package it is in, is what is not there."""
    return isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")


def _check_not_shadowed(module: Any, module_name: str, given: str, search_path: Sequence[str | Path]) -> None:
    """Refuses a module of the same name from elsewhere that was imported before the user's file was looked for."""
    for folder in search_path:
        stem = Path(folder).joinpath(*module_name.split("."))
        files = [file for file in (stem.with_suffix(".py"), stem / "__init__.py") if file.is_file()]
        if not files:
            continue
        loaded = getattr(module, "__file__", None)
        if loaded is None or not files[0].samefile(loaded):
            raise UserError(
                f"{given} means {files[0].resolve()}, but a module named {module_name} is already loaded from "
                f"{loaded or 'the interpreter itself'}. Rename your file."
            )
        return
