"""Checks the code that a config names as `module:function`: files next to the config, or packages in `run.allow`.

A name in a config is imported and called. Without a limit, `model: {name: "os:system", command: ...}` would run a shell
command when a user runs `spmdkit explain` on the config. So a name must refer to a file in the directory of the config
or in the working directory; the standard library, installed packages and other files must be listed. The location of
the file counts, not its name, and it is found before anything is imported.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..parallel.model.user_code import find_foreign_code
from .config_errors import Problem
from .config_paths import search_path
from .schema import Config

FORM = "must be module:function, such as my_model:make."


def code_problems(config: Config) -> list[Problem]:
    """Returns the problems of the code that a config names; imports nothing.

    Missing modules are left to the import, which reports the searched directories.

    Args:
        config: A config with `run.root` set.
    """
    metrics = config.model.get("metrics")
    named: dict[str, Any] = {
        **{f"model.{key}": config.model.get(key) for key in ("name", "loss", "inputs")},
        **{f"model.metrics.{name}": each for name, each in (metrics if isinstance(metrics, Mapping) else {}).items()},
        "data.source": config.data.source,
        "optimizer.name": config.optimizer.name,
        **{f"data.mixture[{number}].source": part.source for number, part in enumerate(config.data.mixture)},
        **{f"optimizer.groups.{pattern}.name": group.name for pattern, group in config.optimizer.groups.items()},
    }
    named |= {f"callbacks.{place}.name": each["name"] for place, each in enumerate(config.callbacks)}
    names = {key: name for key, name in named.items() if isinstance(name, str) and ":" in name}
    found = {key: _explain_refusal(name, config.run.allow, search_path(config.run.root)) for key, name in names.items()}
    return [Problem(key, f"{key}={names[key]!r} {message}") for key, message in found.items() if message]


def _explain_refusal(name: str, allow: Sequence[str], folders: Sequence[Path]) -> str:
    """Returns the reason that a config may not name `module:function`, or ""."""
    module_name, _, function = name.partition(":")
    if not function or not all(module_name.split(".")):
        return FORM
    if any(f"{module_name}.".startswith(f"{listed}.") for listed in allow):
        return ""
    location = find_foreign_code(module_name, folders)
    return _message(module_name.partition(".")[0], location, folders, allow) if location else ""


def _message(package: str, location: str, folders: Sequence[Path], allow: Sequence[str]) -> str:
    own = " or ".join(dict.fromkeys(str(folder.absolute()) for folder in folders))
    listed = ", ".join(f'"{each}"' for each in (*allow, package))
    files = [folder / each for folder in folders for each in (f"{package}.py", f"{package}/__init__.py")]
    hidden = [file for file in files if file.is_file()]
    remedy = f"Rename {hidden[0].absolute()}, which it hides; or if" if hidden else "If"
    return (
        f"would import {package}, which is {location}. A config names code in {own}, or in what run.allow lists. "
        f"{remedy} you trust {package} with what this config says: 'run.allow=[{listed}]'."
    )
