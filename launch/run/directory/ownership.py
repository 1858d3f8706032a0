"""A run directory belongs to one job at a time: whose it is, and when another may take it over.

`owner.json` in the directory names its owner: host, process, since when. The owner touches the file every few seconds
and removes it at its end. Another job that wants the directory

    finds no file                                      takes it
    finds a process of this machine that is gone       takes it over at once
    finds a process of this machine that is there      is refused
    finds an owner on another machine                  watches the file: touched again, it is refused; not touched for
                                                       half a minute, it takes it over

Times of different machines are never compared, only whether the file changes while it is watched. An owner that was
stopped for so long that another took over finds that out before its next save, and ends without writing.

Of several that take the same file over, one may win. No file system replaces a file only if it still is what was read,
so that there is a claim for each file that was left, named after its token:

    owner.json                 says A, which is gone
    owner.json.after-A         made by one of them alone (O_EXCL); the others are refused
                               owner.json still says A: the claim is renamed to owner.json, in one step
                               it says something else: somebody was faster, and the claim is removed

Without the claim of A nobody replaces the file of A, and what has been replaced never says A again: to look and then to
rename is safe. A process that dies with a claim leaves a file like any other, taken over in the same way
(owner.json.after-B). Making a file that is not there and renaming are all that is asked of a file system, NFS included.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from ....mesh.errors import UserError
from ....training.ending.exits import TRY_AGAIN
from .owner import NAME, Look, Owner, look, read_owner, this_place, this_process

CLAIM = f"{NAME}.after-"
TOUCH_SECONDS = 5.0
STALE_SECONDS = 30.0
"""Without a touch, after which an owner on another machine counts as gone: six are missing by then."""


class DirectoryInUse(UserError):
    """Another job owns the directory of the run."""


class OwnershipLost(RuntimeError):
    """Another job has taken the directory over, while this one stood still."""

    exit_code = TRY_AGAIN


class Ownership:
    """This job's hold on a directory, for a `with` block; nothing is written before `take`."""

    def __init__(self, folder: Path, say: Callable[[str], None] = lambda line: None) -> None:
        """Prepares to own a directory.

        Args:
            folder: The directory of the run.
            say: Gets a line where there is something to wait for.
        """
        self._path = folder / NAME
        self._say = say
        self._mine: Owner | None = None
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ignored: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        if self._mine is not None:
            self._release(self._mine)
        self._mine = None

    def take(self) -> None:
        """Makes the directory this job's own; it has to exist.

        Raises:
            DirectoryInUse: It belongs to another job that is there.
        """
        mine = this_process()
        self._acquire(self._path, mine)
        self._mine = mine
        _remove_claims(self._path, but=_claim(self._path, Look(mine, 0)))
        self._thread = threading.Thread(target=self._touch, name="own-run-directory", daemon=True)
        self._thread.start()

    def _acquire(self, path: Path, mine: Owner) -> None:
        """Makes a file this process's own: that of the owner, or a claim to take over another file.

        Raises:
            DirectoryInUse: It belongs to a job that is there.
        """
        while not _create(path, mine):
            left = look(path)
            if left is None:
                continue  # it has just been released
            if not _is_gone(left):
                self._watch(path, left)
            claim = _claim(path, left)
            self._acquire(claim, mine)
            if look(path) == left:
                with suppress(FileNotFoundError):  # removed by whoever has the directory: then nothing is left to claim
                    claim.replace(path)
                    return
            claim.unlink(missing_ok=True)

    def _release(self, mine: Owner) -> None:
        """Removes the file of the owner, where it is still this process's and nobody takes it over meanwhile."""
        claim = _claim(self._path, Look(mine, 0))
        try:
            is_free = _create(claim, mine)
        except OSError:  # a full disk
            is_free = True
        if is_free:
            if read_owner(self._path.parent) == mine:
                self._path.unlink(missing_ok=True)
            claim.unlink(missing_ok=True)

    def check(self) -> None:
        """Makes sure that the directory is still this job's; before anything in it is replaced.

        Raises:
            OwnershipLost: It is another's, or is no longer there.
        """
        if self._mine is None:
            return
        owner = read_owner(self._path.parent)
        if owner is None and not os.path.exists(self._path.with_name("config.yaml")):
            raise OwnershipLost(
                f"{self._path.parent} was removed or emptied while this run was under way: neither {NAME} nor "
                "config.yaml is there. The run ends; the same command begins anew."
            )
        if owner != self._mine:
            raise OwnershipLost(
                f"{self._path.parent} was taken over by {owner or 'a job that has ended since'}: this process stood "
                f"still for more than {STALE_SECONDS:.0f} s. It ends without writing; the other job goes on."
            )

    def _touch(self) -> None:
        while not self._end.wait(TOUCH_SECONDS):
            with suppress(OSError):  # the next save says what is wrong with the file system
                os.utime(self._path)

    def _watch(self, path: Path, before: Look) -> None:
        """Waits until the owner of a file counts as gone.

        Raises:
            DirectoryInUse: It does not.
        """
        owner = before.owner
        if owner is not None and owner.place == this_place():
            raise _in_use(self._path.parent, owner)
        self._say(
            f"{self._path.parent} belongs to {owner or 'a job that does not say whose it is'}; waiting "
            f"{STALE_SECONDS:.0f} s to see whether it is still there."
        )
        deadline = time.monotonic() + STALE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(min(1.0, STALE_SECONDS / 10))
            now = look(path)
            if now is None:
                return
            if now != before:
                raise _in_use(self._path.parent, now.owner)


def refuse_if_in_use(folder: Path) -> None:
    """Looks whether a directory belongs to a job of this machine that is still there; writes nothing.

    Raises:
        DirectoryInUse: It does.
    """
    owner = read_owner(folder)
    if owner is not None and owner.place == this_place() and not owner.is_gone and owner.pid != os.getpid():
        raise _in_use(folder, owner)


def _is_gone(found: Look) -> bool:
    return found.owner is not None and found.owner.is_gone


def _create(path: Path, owner: Owner) -> bool:
    """Writes the file of an owner where there is none; whoever comes first has it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(owner._asdict(), file)
    except OSError:  # a full disk: a file that says nothing would be waited for
        path.unlink(missing_ok=True)
        raise
    return True


def _claim(path: Path, left: Look) -> Path:
    """The file of whoever takes over what was left in a file, named after that alone."""
    named = left.owner.token if left.owner else f"{left.changed}"
    key = hashlib.sha256(f"{path.name} {named}".encode()).hexdigest()[:32]
    return path.with_name(f"{CLAIM}{key}")


def _remove_claims(path: Path, *, but: Path) -> None:
    """Removes claims on what is replaced for good; called by the owner, whose own file is claimed by `but`."""
    for claim in path.parent.glob(f"{CLAIM}*"):
        if claim != but:
            claim.unlink(missing_ok=True)


def _in_use(folder: Path, owner: Owner | None) -> DirectoryInUse:
    return DirectoryInUse(
        f"run.dir {folder} is in use by another job: {owner or 'it does not say which'}. Two jobs in one directory "
        "would overwrite each other's checkpoints. Wait for it or stop it, or set run.dir to another."
    )
