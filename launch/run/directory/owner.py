"""Who a run directory belongs to: a process, known by its machine, its number and when it began."""

import errno
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

NAME = "owner.json"
NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


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
        return self.place == this_place() and start_of(self.pid) != self.started


def read_owner(folder: Path) -> Owner | None:
    """Whose a directory is; None where it is nobody's, or the file does not say."""
    found = look(folder / NAME)
    return found.owner if found else None


class Look(NamedTuple):
    """The file of an owner at one moment.

    Attributes:
        owner: what it says; None where it does not say whose it is.
        changed: when it was written or touched last, in nanoseconds of its file system's clock.
    """

    owner: Owner | None
    changed: int


def look(path: Path) -> Look | None:
    """Reads the file of an owner; None where there is none, or has just been replaced on a network file system.

    Raises:
        OSError: It is there and cannot be read.
    """
    try:
        changed, text = path.stat().st_mtime_ns, path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        if error.errno not in NOT_THERE or path.is_symlink():
            raise
        return None
    try:
        return Look(_as_owner(json.loads(text)), changed)
    except (ValueError, TypeError, RecursionError):
        return Look(None, changed)


def _as_owner(values: Any) -> Owner:
    owner = Owner(**values)
    if type(owner.pid) is not int or not all(isinstance(value, str) for value in owner if value is not owner.pid):
        raise TypeError(f"{values} is no owner")
    return owner


def this_process() -> Owner:
    """This process as an owner, with a token that no other has."""
    return Owner(
        host=socket.gethostname(),
        place=this_place(),
        pid=os.getpid(),
        started=start_of(os.getpid()),
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


def start_of(pid: int) -> str:
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
