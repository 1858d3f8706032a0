"""Ownership of a run directory: one job owns it at a time, and another one can take it over if the owner is gone.

`owner.json` names the owner: host, process, time. The owner touches the file every few seconds and removes it at its
end. Another job that wants the directory

    finds no file                                     takes it
    finds a process of this machine that has ended    takes it over at once
    finds a process of this machine that is running   is refused
    finds an owner on another machine                 watches the file: if it is touched, the job is refused; if it is
                                                      not touched for half a minute, the job takes it over

Clocks of different machines are never compared, only whether the file changes. An owner that was stopped for so long
that another job took over notices before its next save, and ends without writing.

A job reads `owner.json` and replaces it while it holds a lock (`owner.json.lock`), so that only one of several jobs
takes over. The operating system releases the lock of a process that dies. On a file system without locks, two jobs that
take over within a few milliseconds can both own the directory; the first one notices before its next save.
"""

import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self
from uuid import uuid4

from ..mesh.errors import TryAgain, UserError
from ..mesh.files import write_text

NAME = "owner.json"
MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
LOCK = f"{NAME}.lock"
TOUCH_SECONDS = 5.0
STALE_SECONDS = 30.0
"""The time without a touch after which an owner on another machine counts as gone."""


class Owner(NamedTuple):
    """The owner of a directory.

    Attributes:
        host: The name of its machine.
        place: The scope of its process number: machine, boot and process namespace.
        pid: The process number.
        started: The start of that process, as its machine reports it; a later process can have the same number.
        since: The local time of the claim.
        token: The identifier of this ownership.
        run: The identity of the run; see checkpoints/identity.py.
    """

    host: str
    place: str
    pid: int
    started: str
    since: str
    token: str
    run: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    @property
    def is_gone(self) -> bool:
        """True if the process has ended; always False for another machine."""
        return self.place == this_place() and start_of(self.pid) != self.started


class OwnerFile(NamedTuple):
    """The file of an owner at one moment.

    Attributes:
        owner: The owner; None if the content is invalid.
        changed: The modification time, in nanoseconds of the file system's clock.
    """

    owner: Owner | None
    changed: int


def read_owner(folder: Path) -> Owner | None:
    """Returns the owner of a directory; None if there is none, or its file is invalid."""
    found = read_owner_file(folder / NAME)
    return found.owner if found else None


def read_owner_file(path: Path) -> OwnerFile | None:
    """Reads the file of an owner; None if it is missing, or was just replaced on a network file system.

    Raises:
        OSError: The file exists and cannot be read.
    """
    try:
        changed, text = path.stat().st_mtime_ns, path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        if error.errno not in MISSING or path.is_symlink():
            raise
        return None
    try:
        return OwnerFile(Owner(**json.loads(text)), changed)
    except (ValueError, TypeError):
        return OwnerFile(None, changed)


def this_process() -> Owner:
    """Returns this process as an owner, with a new token."""
    return Owner(
        host=socket.gethostname(),
        place=this_place(),
        pid=os.getpid(),
        started=start_of(os.getpid()),
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
        token=uuid4().hex,
    )


def this_place() -> str:
    """Returns the scope of process numbers: the host, its boot and, in containers, the process namespace."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def start_of(pid: int) -> str:
    """Returns the start time of a process of this machine, in its own units; "" if it has ended or is a zombie."""
    if fields := read_stat(pid):
        return "" if fields[0] in "ZX" else fields[19]
    if Path("/proc/self/stat").exists():
        return ""
    try:  # without /proc, only the existence of a process with that number is known
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "unknown"


def read_stat(pid: int) -> list[str]:
    """Returns /proc/PID/stat from the state of the process on; empty if it has ended, or without /proc."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return []


class DirectoryInUse(UserError):
    """Another job owns the run directory."""


class OwnershipLost(TryAgain):
    """Another job took over the directory while this one was stopped."""


class Ownership:
    """This job's ownership of a directory, for a `with` block; writes nothing before `take`."""

    def __init__(self, folder: Path, say: Callable[[str], None] = lambda line: None, *, run: str = "") -> None:
        """Prepares to own a directory.

        Args:
            folder: The run directory.
            say: Prints a line if the job must wait.
            run: The identity of the run.
        """
        self._path = folder / NAME
        self._run = run
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
            with suppress(OSError), _lock(self._path.parent):  # a full disk: the next job finds that this one has ended
                if read_owner(self._path.parent) == self._mine:
                    self._path.unlink()
        self._mine = None

    def take(self) -> None:
        """Takes the directory, which must exist.

        Raises:
            DirectoryInUse: It belongs to another running job.
        """
        mine = this_process()._replace(run=self._run)
        gone = None
        while True:
            with _lock(self._path.parent):
                found = read_owner_file(self._path)
                if found is None or found == gone or (found.owner is not None and found.owner.is_gone):
                    write_text(self._path, json.dumps(mine._asdict()))
                    break
            self._watch(found)
            gone = found
        self._mine = mine
        self._thread = threading.Thread(target=self._touch, name="own-run-directory", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Checks that the directory is still this job's, before anything in it is replaced.

        Raises:
            OwnershipLost: It belongs to another job, or was removed.
        """
        if self._mine is None:
            return
        owner = read_owner(self._path.parent)
        if owner != self._mine:
            why = (
                f"{self._path.parent} now belongs to {owner}, which took it over because this process had been stopped "
                f"for more than {STALE_SECONDS:.0f} s. The other job continues the run"
                if owner
                else f"{self._path.parent} was emptied or replaced while this job trained in it. Start the same "
                "command again: it begins anew, or continues if the checkpoints are put back"
            )
            raise OwnershipLost(f"{why}. This job ends without writing.")

    def _touch(self) -> None:
        while not self._end.wait(TOUCH_SECONDS):
            with suppress(OSError):  # the next save reports the error of the file system
                os.utime(self._path)

    def _watch(self, before: OwnerFile) -> None:
        """Waits until an owner counts as gone, or has released the directory.

        Raises:
            DirectoryInUse: The owner is still there.
        """
        owner = before.owner
        if owner is not None and owner.place == this_place():
            raise _in_use(self._path.parent, owner)
        self._say(
            f"{self._path.parent} belongs to {owner or 'an unknown job'}; waiting {STALE_SECONDS:.0f} s to see if it "
            "is still there."
        )
        deadline = time.monotonic() + STALE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(min(1.0, STALE_SECONDS / 10))
            now = read_owner_file(self._path)
            if now is None:
                return
            if now != before:
                raise _in_use(self._path.parent, now.owner)


def refuse_if_in_use(folder: Path) -> None:
    """Checks if a directory belongs to a running job of this machine; writes nothing.

    Raises:
        DirectoryInUse: It does.
    """
    owner = read_owner(folder)
    if owner is not None and owner.place == this_place() and not owner.is_gone and owner.pid != os.getpid():
        raise _in_use(folder, owner)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Holds the lock of owner.json; other jobs wait. Has no effect on a file system without locks."""
    path = folder / LOCK
    while True:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        with open(descriptor, "ab") as file:  # its end releases the lock
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_file(path, file.fileno()):
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return


def _is_file(path: Path, descriptor: int) -> bool:
    """Returns False if an open file has been removed, as the previous holder of a lock does."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False


def _in_use(folder: Path, owner: Owner | None) -> DirectoryInUse:
    return DirectoryInUse(
        f"run.dir {folder} is in use by another job: {owner or 'an unknown one'}. Two jobs in one directory would "
        "overwrite each other's checkpoints. Wait for it or stop it, or set run.dir to another directory."
    )
