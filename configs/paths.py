"""Where the relative paths of a config start: one rule for data, schedules and the user's own modules.

A path in a YAML file starts from the folder of that file, wherever the command is typed; a path in a `key=value`
argument, or under a preset, starts from the working directory, as every path on a command line. `run.root` says so
itself where something else is wanted, and holds the folder in the config.yaml of a run. `run.dir` always starts from
the working directory.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEDULE = "strategy.pipe.schedule"
PATH_KEYS = ("data.files", "data.eval_files", "data.tokenizer", SCHEDULE)
"""Keys whose values are paths, or lists of them."""
MIXTURE = "data.mixture"
"""A list of parts, each with files of its own."""
ROOT = "run.root"


def find_root(tree: Mapping[str, Any], given_by: Mapping[str, str], folder: Path | None) -> Path:
    """Returns the absolute folder that relative paths start from.

    Args:
        tree: The plain values of a config, overrides included.
        given_by: The keys that overrides give.
        folder: That of the YAML file; None for a preset.
    """
    below = Path.cwd() if folder is None else folder.absolute()
    given = _get(tree, ROOT)
    if not given or not isinstance(given, str):
        return below
    return (Path.cwd() if _is_override(ROOT, given_by) else below) / Path(given).expanduser()


def search_path(root: str) -> tuple[Path, ...]:
    """Where the user's own modules are: in `run.root`, then in the working directory.

    Args:
        root: `run.root` of a loaded config.
    """
    return (Path(root or "."), Path.cwd())


def anchor_overrides(tree: dict[str, Any], given_by: Mapping[str, str], root: Path) -> None:
    """Makes the relative paths that overrides give absolute, in place, where they do not start from `root` anyway."""
    if root == Path.cwd():
        return
    for key in PATH_KEYS:
        *above, name = key.split(".")
        parent, value = _get(tree, ".".join(above)), _get(tree, key)
        if value and _is_override(key, given_by):
            parent[name] = _all_from_here(value, key)
    if _is_override(MIXTURE, given_by) and isinstance(parts := _get(tree, MIXTURE), list):
        for part in (part for part in parts if isinstance(part, dict)):
            part |= {name: _all_from_here(part[name], MIXTURE) for name in ("files", "eval_files") if name in part}


def below_root(path: str, root: str) -> str:
    """Returns a path or glob so that it is found from anywhere.

    Args:
        path: Relative or absolute; `~` is the home folder.
        root: The folder that relative ones start from; empty = the working directory.
    """
    return os.path.join(root, os.path.expanduser(path))


def is_schedule_file(schedule: str) -> bool:
    """Tells whether `strategy.pipe.schedule` names a file."""
    return schedule.endswith(".csv")


def _all_from_here(value: Any, key: str) -> Any:
    return [_from_here(item, key) for item in value] if isinstance(value, list) else _from_here(value, key)


def _from_here(value: Any, key: str) -> Any:
    if not isinstance(value, str) or (key == SCHEDULE and not is_schedule_file(value)):
        return value
    return below_root(value, os.getcwd())


def _is_override(key: str, given_by: Mapping[str, str]) -> bool:
    return any(key == given or key.startswith(f"{given}.") for given in given_by)


def _get(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree
