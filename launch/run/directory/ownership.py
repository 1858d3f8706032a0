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
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self
from uuid import uuid4

from ....mesh.errors import UserError
from ....training.ending.exits import TRY_AGAIN

NAME = "owner.json"
TOUCH_SECONDS = 5.0
STALE_SECONDS = 30.0
"""Without a touch, after which an owner on another machine counts as gone: six are missing by then."""


class DirectoryInUse(UserError):
    """Another job owns the directory of the run."""


class OwnershipLost(RuntimeError):
    """Another job has taken the directory over, while this one stood still."""

    exit_code = TRY_AGAIN


class Owner(NamedTuple):
    """Who a directory belongs to.

    Attributes:
        host: name of its machine, for people.
        place: where its process number means something: machine, boot and process namespace.
        pid: the process.
        started: when that process began, as its machine tells; another process of the same number began later.
        since: when it took the directory, local time, for people.
        token: of this ownership alone.
    """

    host: str
    place: str
    pid: int
    started: str
    since: str
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    @property
    def is_gone(self) -> bool:
        """Whether it is known to have ended; of a process on another machine that is never known."""
        return self.place == this_place() and _start_of(self.pid) != self.started


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
        if self._mine is not None and read_owner(self._path.parent) == self._mine:
            self._path.unlink(missing_ok=True)
        self._mine = None

    def take(self) -> None:
        """Makes the directory this job's own; it has to exist.

        Raises:
            DirectoryInUse: It belongs to another job that is there.
        """
        mine = _this_process()
        while not _create(self._path, mine):
            before = _look(self._path)
            if before is None:
                continue  # it has just been released
            if not _is_gone(before):
                self._watch(before)
            _remove(self._path, before)
        self._mine = mine
        self._thread = threading.Thread(target=self._touch, name="own-run-directory", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Makes sure that the directory is still this job's; before anything in it is replaced.

        Raises:
            OwnershipLost: It is another's.
        """
        if self._mine is None:
            return
        owner = read_owner(self._path.parent)
        if owner != self._mine:
            raise OwnershipLost(
                f"{self._path.parent} was taken over by {owner or 'a job that has ended since'}: this process stood "
                f"still for more than {STALE_SECONDS:.0f} s. It ends without writing; the other job goes on."
            )

    def _touch(self) -> None:
        while not self._end.wait(TOUCH_SECONDS):
            with suppress(OSError):  # the next save says what is wrong with the file system
                os.utime(self._path)

    def _watch(self, before: "_Look") -> None:
        """Waits until an owner counts as gone.

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
            now = _look(self._path)
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


def read_owner(folder: Path) -> Owner | None:
    """Whose a directory is; None where it is nobody's, or the file does not say."""
    found = _look(folder / NAME)
    return found.owner if found else None


class _Look(NamedTuple):
    """The file of an owner at one moment."""

    owner: Owner | None
    changed: int


def _look(path: Path) -> _Look | None:
    try:
        changed, text = path.stat().st_mtime_ns, path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    try:
        return _Look(_as_owner(json.loads(text)), changed)
    except (ValueError, TypeError, RecursionError):
        return _Look(None, changed)


def _as_owner(values: Any) -> Owner:
    owner = Owner(**values)
    if type(owner.pid) is not int or not all(isinstance(value, str) for value in owner if value is not owner.pid):
        raise TypeError(f"{values} is no owner")
    return owner


def _is_gone(found: _Look) -> bool:
    return found.owner is not None and found.owner.is_gone


def _create(path: Path, owner: Owner) -> bool:
    """Writes the file of an owner where there is none; whoever comes first has it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(owner._asdict(), file)
    return True


def _remove(path: Path, judged: _Look) -> None:
    """Removes the file of an owner that is gone, unless another job has replaced it meanwhile."""
    aside = path.with_name(f"{NAME}.{uuid4().hex}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    found = _look(aside)
    if found is not None and found.owner != judged.owner:  # a job was faster: it gets its file back
        with suppress(OSError):
            os.link(aside, path)
    aside.unlink(missing_ok=True)


def _in_use(folder: Path, owner: Owner | None) -> DirectoryInUse:
    return DirectoryInUse(
        f"run.dir {folder} is in use by another job: {owner or 'it does not say which'}. Two jobs in one directory "
        "would overwrite each other's checkpoints. Wait for it or stop it, or set run.dir to another."
    )


def _this_process() -> Owner:
    return Owner(
        host=socket.gethostname(),
        place=this_place(),
        pid=os.getpid(),
        started=_start_of(os.getpid()),
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
        token=uuid4().hex,
    )


def this_place() -> str:
    """Where process numbers are the same: the host, its boot and, in containers, the process namespace."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _start_of(pid: int) -> str:
    """When a process of this machine began, in its own units; "" where there is none, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return ""
    except OSError:
        return ""
    try:  # no /proc: all that is known is whether there is a process of that number
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "unknown"
