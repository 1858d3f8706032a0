"""Which code a config may name as `module:function`: files beside it, and what `run.allow` lists.

A name in a config is imported and called. Without a limit `model: {name: "os:system", command: ...}` would run a shell
command for whoever only looks at the config with `spmdkit explain`. So names lead to files in the folder of the config
and in the working directory; the standard library, installed packages and files elsewhere have to be listed. What
counts is where the file is, not what it is called, and it is found before anything is imported.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...mesh.module_files import ModuleFile, module_files
from ..errors import Problem
from ..paths import search_path
from ..schema import Config

FORM = "has to be module:function, such as my_model:make."


def code_problems(config: Config) -> list[Problem]:
    """Returns what is wrong with the code that a config names; imports nothing.

    What there is not is left to the import, which says where it looked.

    Args:
        config: A config whose `run.root` is known.
    """
    return [problem for key, name in _named(config) for problem in _problems(key, name, config)]


def _named(config: Config) -> Iterator[tuple[str, str]]:
    """Every key of which a value may be `module:function`, with that value."""
    named: dict[str, Any] = {
        "model.name": config.model.get("name"),
        "model.loss": config.model.get("loss"),
        "model.inputs": config.model.get("inputs"),
        **{f"model.metrics.{name}": each for name, each in _mapping(config.model.get("metrics")).items()},
        "data.source": config.data.source,
        "optimizer.name": config.optimizer.name,
        **{f"data.mixture[{number}].source": part.get("source") for number, part in enumerate(config.data.mixture)},
        **{f"optimizer.groups.{pattern}.name": group.name for pattern, group in config.optimizer.groups.items()},
    }
    named |= {f"callbacks.{place}.name": each["name"] for place, each in enumerate(config.callbacks)}
    return ((key, name) for key, name in named.items() if isinstance(name, str) and ":" in name)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _problems(key: str, name: str, config: Config) -> Iterator[Problem]:
    module_name, _, function = name.partition(":")
    if not function or not all(module_name.split(".")):
        yield Problem(key, f"{key}={name!r} {FORM}")
        return
    allow, folders = config.run.allow, search_path(config.run.root)
    if is_listed(module_name, allow):
        return
    for module in module_files(module_name, folders):
        where = _outside(module, folders)
        if where:
            yield Problem(key, f"{key}={name!r} {_message(module.name, where, folders, allow)}")
            return


def is_listed(module_name: str, allow: Sequence[str]) -> bool:
    """Tells whether a module, or a package that it is in, is listed.

    Args:
        module_name: Dotted.
        allow: `run.allow`.
    """
    return any(f"{module_name}.".startswith(f"{listed}.") for listed in allow)


def _outside(module: ModuleFile, folders: Sequence[Path]) -> str:
    """Where a module is, where that is not beside the config; else ""."""
    if module.origin:
        return module.origin
    beside = {os.path.realpath(folder) for folder in folders}
    return "" if str(module.folder) in beside else f"{module.file}"


def _message(module_name: str, where: str, folders: Sequence[Path], allow: Sequence[str]) -> str:
    package = module_name.partition(".")[0]
    own = " or ".join(dict.fromkeys(str(folder.absolute()) for folder in folders))
    listed = ", ".join(f'"{each}"' for each in (*allow, package))
    files = [folder / each for folder in folders for each in (f"{package}.py", f"{package}/__init__.py")]
    hidden = [file for file in files if file.is_file()]
    remedy = f"Rename {hidden[0].absolute()}, which it hides; or if" if hidden else "If"
    return (
        f"would import {module_name}, which is {where}. A config names code in {own}, or in what run.allow lists. "
        f"{remedy} you trust {package} with what this config says: 'run.allow=[{listed}]'."
    )
