"""The folder of a run: taking it for a new run, or finding that it holds this one and may go on."""

from pathlib import Path
from typing import Any

import yaml
from jax.experimental import multihost_utils

from ..configs.schema import Config
from ..configs.write import as_plain, resolved_yaml
from ..mesh.errors import UserError
from ..mesh.processes import is_main_process
from .folder import make_folder

FIXED = ("model", "data", "optimizer.name", "run.seed", "train.global_batch", "precision.params")
"""What a run cannot change halfway: it would no longer be the run its checkpoints and losses are from."""
FREE = ("data.prefetch", "data.threads", "model.check")
"""Keys under FIXED that change nothing in the numbers."""


def adopt_folder(config: Config) -> Path:
    """Takes the folder of a run, once it is new or found to hold an earlier part of the same run; writes nothing.

    Every process of the run calls this.

    Returns:
        The absolute path of `run.dir`.

    Raises:
        UserError: The folder holds a run that differs in something fixed; every difference is listed.
    """
    folder = Path(config.run.dir).absolute()
    written = folder / "config.yaml"
    if written.exists():
        _check_same_run(folder, yaml.safe_load(written.read_text(encoding="utf-8")), as_plain(config))
    _wait_for_all("the folder of the run was read")
    return folder


def write_config(config: Config, folder: Path) -> None:
    """Writes the whole config as config.yaml into an adopted folder, in one piece; only process 0 does.

    Raises:
        UserError: The folder cannot be made.
    """
    if not is_main_process():
        return
    make_folder(folder)
    partial = folder / "config.yaml.partial"
    partial.write_text(resolved_yaml(config), encoding="utf-8")
    partial.replace(folder / "config.yaml")


def _check_same_run(folder: Path, before: Any, now: dict[str, Any]) -> None:
    changed = [
        f"{key}: {_get(before, key)!r} then, {_get(now, key)!r} now"
        for key in sorted({*_leaves(before), *_leaves(now)})
        if _is_fixed(key) and _get(before, key) != _get(now, key)
    ]
    if changed:
        raise UserError(
            f"{folder} holds a run that differs from this one in what a run cannot change halfway:\n"
            + "\n".join(f"  {line}" for line in changed)
            + "\nSet these back to go on with it, or choose another run.dir to start anew."
        )


def _is_fixed(key: str) -> bool:
    return key not in FREE and any(key == fixed or key.startswith(f"{fixed}.") for fixed in FIXED)


def _leaves(values: Any, prefix: str = "") -> list[str]:
    """The dotted keys of a plain config."""
    if not isinstance(values, dict):
        return [prefix]
    return [
        key for name, value in values.items() for key in _leaves(value, f"{prefix}.{name}" if prefix else str(name))
    ]


def _get(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values


def _wait_for_all(what: str) -> None:
    multihost_utils.sync_global_devices(what)
