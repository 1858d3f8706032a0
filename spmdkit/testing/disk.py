"""A disk of a few megabytes that can be filled, or made read-only, without harm to any other."""

# pyright: reportMissingImports=false

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..mesh.errors import UserError

FILLER = "filler"


class SmallDisk:
    """A file system in memory, mounted for a `with` block of `small_disk`."""

    def __init__(self, path: Path) -> None:
        """Takes the folder on which it is mounted."""
        self.path = path

    def fill(self, leave: int = 0) -> None:
        """Takes all room but for so many bytes.

        Args:
            leave: Bytes that stay free; 0 leaves none.
        """
        with open(self.path / FILLER, "ab", buffering=0) as file:
            room = os.statvfs(self.path)
            for size in (max(0, room.f_bavail * room.f_frsize - leave), 0 if leave else 1 << 20):
                try:
                    while size and (written := file.write(b"\0" * size)):
                        size -= written
                except OSError:
                    return

    def make_room(self) -> None:
        """Gives the room back."""
        (self.path / FILLER).unlink(missing_ok=True)

    def read_only(self, yes: bool = True) -> None:
        """Allows no writing any more, or allows it again."""
        _run("mount", "-o", f"remount,{'ro' if yes else 'rw'}", str(self.path))


@contextmanager
def small_disk(path: Path, megabytes: int = 4) -> Iterator[SmallDisk]:
    """Mounts a small file system on a folder, which is made if it is missing.

    Args:
        path: The folder.
        megabytes: Its size.

    Raises:
        UserError: This needs root, and a kernel that allows it.
    """
    path.mkdir(parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path))
    try:
        yield SmallDisk(path)
    finally:
        _run("umount", "-l", str(path))


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise UserError(f"A small disk needs root and `mount`: {' '.join(command)}: {said.strip()}") from None
