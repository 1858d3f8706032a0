"""Which run an argument means: its folder, that of one of its checkpoints, or the config that trained it."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ...configs.load import ON_COMMAND_LINE, find_config, load_config
from ...configs.presets import preset_names
from ...mesh.errors import UserError
from ...mesh.files import absolute_path
from ..inspection.finding import Found, find, refuse_empty, shown


class Place(NamedTuple):
    """A run on disk.

    Attributes:
        found: its checkpoints, and which of them is meant.
        config: the file of its config.
    """

    found: Found
    config: Path


def find_run(
    given: str | Path, step: int | None = None, changes: Sequence[str] = (), said: str = ON_COMMAND_LINE
) -> Place:
    """Finds the run that an argument means.

    Args:
        given: The folder of a run or of one of its checkpoints; or a YAML file or preset whose `run.dir` holds a run.
        step: Of one checkpoint.
        changes: `key=value` laid over the config, which may say another `run.dir`.
        said: Where the changes stand, for messages.

    Raises:
        UserError: There is no such run (CheckpointError where it has no such checkpoint), or no config of it.
    """
    source = _config_file(given)
    found = find_checkpoints(given, step, changes, said)
    return Place(found, _config_of(found) if source is None else source)


def find_checkpoints(
    given: str | Path, step: int | None = None, changes: Sequence[str] = (), said: str = ON_COMMAND_LINE
) -> Found:
    """Finds the checkpoints of the run that an argument means; no config has to be beside them.

    Args:
        given: As in `find_run`.
        step: Of one checkpoint.
        changes: As in `find_run`.
        said: As in `find_run`.

    Raises:
        UserError: There is no such run (CheckpointError where it has no such checkpoint).
    """
    source = _config_file(given)
    if source is None:
        return find(str(given), step)
    folder = absolute_path(load_config(source, changes, sizes=False, said=said).run.dir)
    if not folder.is_dir():
        raise UserError(
            f"{given} says run.dir={folder}, and there is no such folder: it has not been trained yet. Train it "
            f"(spmdkit train {given}), or give the folder of a run."
        )
    return find(str(folder), step)


def find_folder(given: str | Path) -> Path:
    """Finds the folder of the run that an argument means; it need not hold a checkpoint yet.

    Args:
        given: As in `find_run`.

    Returns:
        Its absolute path.

    Raises:
        UserError: There is no such run.
    """
    refuse_empty(given)
    source, path = _config_file(given), absolute_path(given)
    if source is None and any((path / name).is_file() for name in ("metrics.jsonl", "config.yaml")):
        return path.resolve()
    if source is not None:
        folder = absolute_path(load_config(source, sizes=False).run.dir)
        if folder.is_dir():
            return folder.resolve()
    return find_checkpoints(given).run.resolve()


def names_folder(given: str | Path) -> bool:
    """Whether an argument means a folder, and no config: nothing can be laid over it."""
    return _config_file(given) is None


def _config_file(given: str | Path) -> Path | None:
    """The YAML file or preset that is meant; None where it is a folder."""
    path = Path(given)
    is_preset = not path.exists() and path.parent == Path() and path.name.removesuffix(".yaml") in preset_names()
    return find_config(path) if path.is_file() or is_preset else None


def _config_of(found: Found) -> Path:
    config = found.run / "config.yaml"
    with suppress(OSError):
        if config.is_file():
            return config
    raise UserError(
        f"{shown(found.run)} has checkpoints, but no config.yaml that says which model they are of. Put it back, or "
        "give the YAML file that the run was trained with in place of the folder."
    )
