"""Checkpoints as broken disks leave them: bits flipped, files cut, files gone."""

# pyright: reportMissingImports=false

import shutil
from pathlib import Path

from ..mesh.errors import UserError


def newest(checkpoints: Path) -> Path | None:
    """The folder of the newest complete checkpoint; None where there is none."""
    steps = [each for each in checkpoints.glob("*") if each.name.isdecimal()] if checkpoints.is_dir() else []
    return max(steps, key=lambda each: int(each.name), default=None)


def damage(checkpoint: Path, how: str) -> None:
    """Damages a checkpoint.

    Args:
        checkpoint: The folder of one step.
        how: "flip", a bit in the middle of every file of arrays (not every one of them is read); "truncate", each of
            them cut in half; "remove", all of them gone; "metadata", its description gone; "empty", all files gone.

    Raises:
        UserError: There is nothing to damage.
    """
    if how == "empty":
        shutil.rmtree(checkpoint)
        checkpoint.mkdir()
        return
    wanted = "*METADATA*" if how == "metadata" else "d/*"
    files = sorted(path for path in checkpoint.rglob(wanted) if path.is_file())
    if not files:
        raise UserError(f"{checkpoint} holds no files to damage.")
    for path in files:
        _damage_file(path, how)


def _damage_file(path: Path, how: str) -> None:
    if how in ("remove", "metadata"):
        path.unlink()
        return
    content = bytearray(path.read_bytes())
    if how == "truncate":
        del content[len(content) // 2 :]
    else:
        content[len(content) // 2] ^= 4
    path.write_bytes(content)
