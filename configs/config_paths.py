"""Resolves the relative paths of a config: data, schedules and the user's own modules follow one rule.

A path in a YAML file starts from the directory of that file. A path in a `key=value` argument, or under a preset,
starts from the working directory. `run.root` overrides both and is part of the config.yaml of a run. `run.dir` always
starts from the working directory.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEDULE = "strategy.pipe.schedule"
PATH_KEYS = ("data.files", "data.eval_files", "data.tokenizer", SCHEDULE)
"""Keys with paths, or lists of paths, as values."""
MIXTURE = "data.mixture"
"""A list of parts, each with its own files."""
ROOT = "run.root"


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


def search_path(root: str) -> tuple[Path, ...]:
    """Returns the directories of the user's own modules: `run.root`, then the working directory.

    Args:
        root: `run.root` of a loaded config.
    """
    return (Path(root or "."), Path.cwd())


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


def below_root(path: str, root: str) -> str:
    """Returns a path or glob relative to a root, with `~` expanded.

    Args:
        path: An absolute or relative path.
        root: The directory that relative paths start from; empty = the working directory.
    """
    return os.path.join(root, os.path.expanduser(path))


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
