"""Relative paths of a config, and the code that it names: data, schedules and the user's own modules follow one rule.

A path in a YAML file starts from the directory of that file. A path in a `key=value` argument, or under a preset,
starts from the working directory. `run.root` overrides both and is part of the config.yaml of a run. `run.dir` always
starts from the working directory.

A name in a config is imported and called. Without a limit, `model: {name: "os:system", command: ...}` would run a shell
command when a user runs `spmdkit explain` on the config. So a name must refer to a file in the directory of the config
or in the working directory; the standard library, installed packages and other files must be listed. The location of
the file counts, not its name, and it is found before anything is imported.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..mesh.files import below_root
from ..parallel.model.user_code import find_foreign_code
from .config_errors import Problem
from .schema import Config

SCHEDULE = "strategy.pipe.schedule"
PATH_KEYS = ("data.files", "data.eval_files", "data.tokenizer", SCHEDULE)
"""Keys with paths, or lists of paths, as values."""
MIXTURE = "data.mixture"
"""A list of parts, each with its own files."""
ROOT = "run.root"
FORM = "must be module:function, such as my_model:make."


def find_root(tree: Mapping[str, Any], given_by: Mapping[str, str], directory: Path | None) -> Path:
    """Returns the absolute directory that relative paths start from.

    Args:
        tree: The plain values of a config, including overrides.
        given_by: The keys that overrides set.
        directory: The directory of the YAML file; None for a preset.
    """
    below = Path.cwd() if directory is None else directory.absolute()
    given = _get(tree, ROOT)
    if not given or not isinstance(given, str):
        return below
    return (Path.cwd() if _is_override(ROOT, given_by) else below) / Path(given).expanduser()


def anchor_overrides(tree: dict[str, Any], given_by: Mapping[str, str], root: Path) -> None:
    """Makes the relative paths in overrides absolute, in place, unless they start from `root` anyway."""
    if root == Path.cwd():
        return
    for key in PATH_KEYS:
        *above, name = key.split(".")
        parent, value = _get(tree, ".".join(above)), _get(tree, key)
        if value and _is_override(key, given_by):
            parent[name] = _from_here(value, key)
    if _is_override(MIXTURE, given_by) and isinstance(parts := _get(tree, MIXTURE), list):
        for part in (part for part in parts if isinstance(part, dict)):
            part |= {name: _from_here(part[name], MIXTURE) for name in ("files", "eval_files") if name in part}


def is_schedule_file(schedule: str) -> bool:
    """Returns whether `strategy.pipe.schedule` is the name of a file."""
    return schedule.endswith(".csv")


def _from_here(value: Any, key: str) -> Any:
    """Returns a path, or a list of paths, relative to the working directory."""
    if isinstance(value, list):
        return [_from_here(item, key) for item in value]
    if not isinstance(value, str) or (key == SCHEDULE and not is_schedule_file(value)):
        return value
    return below_root(value, os.getcwd())


def _is_override(key: str, given_by: Mapping[str, str]) -> bool:
    return any(key == given or key.startswith(f"{given}.") for given in given_by)


def _get(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


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
    found = {key: _explain_refusal(name, config.run.allow, config.run.search_path) for key, name in names.items()}
    return [Problem(key, f"{key}={names[key]!r} {message}") for key, message in found.items() if message]


def _explain_refusal(name: str, allow: Sequence[str], folders: Sequence[Path]) -> str:
    """Returns the reason that a config may not name `module:function`, or ""."""
    module_name, _, function = name.partition(":")
    if not function or not all(module_name.split(".")):
        return FORM
    if any(f"{module_name}.".startswith(f"{listed}.") for listed in allow):
        return ""
    location = find_foreign_code(module_name, folders)
    return _explain_location(module_name.partition(".")[0], location, folders, allow) if location else ""


def _explain_location(package: str, location: str, folders: Sequence[Path], allow: Sequence[str]) -> str:
    own = " or ".join(dict.fromkeys(str(folder.absolute()) for folder in folders))
    listed = ", ".join(f'"{each}"' for each in (*allow, package))
    files = [folder / each for folder in folders for each in (f"{package}.py", f"{package}/__init__.py")]
    hidden = [file for file in files if file.is_file()]
    remedy = f"Rename {hidden[0].absolute()}, which it hides; or if" if hidden else "If"
    return (
        f"would import {package}, which is {location}. A config names code in {own}, or in what run.allow lists. "
        f"{remedy} you trust {package} with what this config says: 'run.allow=[{listed}]'."
    )
