"""Which checkpoints an argument of the command line means.

runs/one                    a run: its folder of checkpoints
runs/one/checkpoints        that folder itself
runs/one/checkpoints/40     one checkpoint; runs/one/40 is the same
runs/one/checkpoints/damaged-40
"""

from pathlib import Path
from typing import NamedTuple

from ...mesh.errors import UserError
from ...mesh.files import absolute_path
from ...training.checkpointing.errors import CheckpointError
from ...training.checkpointing.folder import DAMAGED, REMOVED, UNFINISHED, Contents, contents


class Found(NamedTuple):
    """What an argument means.

    Attributes:
        checkpoints: the folder of checkpoints.
        contents: what that holds.
        chosen: the folder of one checkpoint, where the argument or `--step` names one.
    """

    checkpoints: Path
    contents: Contents
    chosen: Path | None

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return self.checkpoints.parent

    @property
    def one(self) -> Path:
        """The folder of the checkpoint that is meant: the one named, or the newest.

        Raises:
            CheckpointError: There is none.
        """
        if self.chosen is not None:
            return self.chosen
        if not self.contents.steps:
            raise CheckpointError(f"There is no complete checkpoint in {self.checkpoints}.{_left(self.contents)}")
        return self.checkpoints / str(self.contents.steps[-1])


def find(given: str, step: int | None = None) -> Found:
    """Finds what an argument means.

    Args:
        given: A path, as the examples above.
        step: Of one checkpoint, from `--step`.

    Raises:
        UserError: The name is empty or no text; CheckpointError where there is no such folder, it is no run, or it
            holds no such checkpoint.
        OSError: It cannot be looked at.
    """
    refuse_empty(given)
    path = absolute_path(given)
    _check_text(path)
    if not path.exists():
        inside = path.parent / "checkpoints" / path.name
        if not (_is_one(path.name) and inside.is_dir()):
            raise CheckpointError(f"There is no {path}. Give the folder of a run (run.dir), or that of a checkpoint.")
        path = inside
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file. Give the folder of a run (run.dir), or that of a checkpoint.")
    if _is_one(path.name) and not (path / "checkpoints").is_dir():
        if step is not None:
            raise UserError(f"--step {step}: {path} is one checkpoint already. Leave one of the two out.")
        return Found(path.parent, contents(path.parent), _finished(path))
    checkpoints = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    held = contents(checkpoints)
    if checkpoints is path and not any(held) and (path / "config.yaml").is_file():
        raise CheckpointError(
            f"{path} holds a run that has saved no checkpoint yet. Wait for its first (checkpoint.every steps), or "
            "give another run."
        )
    if checkpoints is path and not any(held) and path.name != "checkpoints":
        raise CheckpointError(
            f"{path} is no run, and no folder of checkpoints: it holds neither checkpoints/ nor a folder that is named "
            "after a step. Give the folder of a run (run.dir)."
        )
    return Found(checkpoints, held, None if step is None else _of_step(checkpoints, held, step))


def refuse_empty(given: str | Path) -> None:
    """Refuses the empty name, as of a variable that is not set: to Path it is the working directory.

    Raises:
        UserError: It is given.
    """
    if given == "":
        raise UserError("The name of a run is empty. Give its folder (run.dir); of the working directory, a dot.")


def _check_text(path: Path) -> None:
    """Refuses a name that cannot be handed on to what reads checkpoints: nothing is wrong with these.

    Raises:
        UserError: It is no UTF-8.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{path}: the name is no text in UTF-8, and under such a name no array can be read. Rename the folder."
        ) from None


def shown(path: str | Path) -> str:
    """A path for people: from the working directory, where it is below that."""
    path = Path(path)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _of_step(checkpoints: Path, held: Contents, step: int) -> Path:
    if step in held.steps:
        return checkpoints / str(step)
    unfinished = [name for name in held.unfinished if name.split(".")[0] == str(step)]
    if unfinished:
        return _finished(checkpoints / unfinished[0])
    there = ", ".join(map(str, held.steps)) or "none"
    raise CheckpointError(f"There is no checkpoint of step {step} in {checkpoints}; there are: {there}.{_left(held)}")


def _finished(path: Path) -> Path:
    """The path of a checkpoint that was completed.

    Raises:
        CheckpointError: It was not.
    """
    if UNFINISHED in path.name:
        raise CheckpointError(
            f"The checkpoint {path} is unfinished: its save never came to an end, and the run does not use it. Take "
            "the one before; the next save of the run removes this one."
        )
    return path


def _left(held: Contents) -> str:
    names = [*held.damaged, *held.unfinished, *held.leaving]
    return f" Besides: {', '.join(names)}." if names else ""


def _is_one(name: str) -> bool:
    """Whether a folder has the name of a checkpoint, in whatever condition."""
    return name.isdecimal() or name.startswith((DAMAGED, REMOVED)) or UNFINISHED in name
