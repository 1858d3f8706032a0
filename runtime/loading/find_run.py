"""Finds the run that an argument names: its directory, one of its checkpoints, or the config that trained it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ...checkpoints.directory import Found, display_path, find, refuse_empty
from ...configs.config_sources import find_config, preset_names
from ...configs.load import ON_COMMAND_LINE, load_config
from ...mesh.errors import UserError
from ...mesh.files import absolute_path


class FoundRun(NamedTuple):
    """A run on disk.

    Attributes:
        found: Its checkpoints, and the selected one.
        source: The YAML file or preset that named it, or None.
    """

    found: Found
    source: Path | None

    @property
    def config(self) -> Path:
        """The file of its config.

        Raises:
            UserError: It is missing.
        """
        config = self.source or self.found.run / "config.yaml"
        if os.path.isfile(config):  # unlike Path.is_file, raises nothing
            return config
        raise UserError(
            f"{display_path(self.found.run)} has checkpoints, but config.yaml, which names their model, is missing. "
            "Restore it, or give the YAML file that the run was trained with instead of the directory."
        )


def find_run(
    given: str | Path, step: int | None = None, changes: Sequence[str] = (), place: str = ON_COMMAND_LINE
) -> FoundRun:
    """Finds the run that an argument names.

    Args:
        given: The directory of a run or of one of its checkpoints; or a YAML file or preset with `run.dir`.
        step: The step of a checkpoint.
        changes: `key=value` overrides of the config, which may set another `run.dir`.
        place: The place of the overrides, for messages.

    Raises:
        UserError: The run does not exist (CheckpointError: its checkpoint).
    """
    source = _config_file(given)
    if source is None:
        return FoundRun(find(str(given), step), None)
    folder = absolute_path(load_config(source, changes, sizes=False, place=place).run.dir)
    if not folder.is_dir():
        raise UserError(
            f"{given} sets run.dir={folder}, and that directory does not exist: it is not trained yet. Train it "
            f"(spmdkit train {given}), or give the directory of a run."
        )
    return FoundRun(find(str(folder), step), source)


def find_folder(given: str | Path) -> Path:
    """Finds the run directory that an argument names; it need not contain a checkpoint yet.

    Args:
        given: See `find_run`.

    Returns:
        The absolute path.

    Raises:
        UserError: The run does not exist.
    """
    refuse_empty(given)
    source = _config_file(given)
    path = absolute_path(load_config(source, sizes=False).run.dir if source else given)
    is_run = path.is_dir() if source else any((path / name).is_file() for name in ("metrics.jsonl", "config.yaml"))
    return (path if is_run else find_run(given).found.run).resolve()


def _config_file(given: str | Path) -> Path | None:
    """Returns the YAML file or preset; None for a directory."""
    path = Path(given)
    is_preset = not path.exists() and path.parent == Path() and path.name.removesuffix(".yaml") in preset_names()
    return find_config(path) if path.is_file() or is_preset else None
