"""The file system of run.dir: writable, with room, with a right clock, and seen by all processes."""

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...mesh.errors import UserError
from ..run.directory.folder import FolderUnavailable, check_folder
from .finding import Finding

GIB = 2**30
LEAST_ROOM = GIB
MOST_SKEW = 5.0
"""Seconds between two clocks, from which on times of files and of log lines mislead."""
NEVER_SHARED = ("tmpfs", "ramfs", "overlay", "devtmpfs")
"""Kinds of file systems that one host has for itself."""
WAIT_SECONDS = 5.0
"""How long a network file system may take to show a new file: it keeps listings for some seconds."""
MOUNTS = Path("/proc/self/mounts")


def folder(run_dir: Path, several_hosts: bool) -> list[Finding]:
    """Looks at run.dir, which need not exist; leaves nothing behind.

    Args:
        run_dir: Absolute.
        several_hosts: Whether the run has processes on others.
    """
    try:
        check_folder(run_dir)
    except UserError as error:
        return [Finding("run.dir", str(error), "wrong", "set run.dir to a folder that can be written")]
    except FolderUnavailable as error:
        return [Finding("run.dir", str(error), "wrong", "make room, or mend the file system")]
    existing = existing_part(run_dir)
    return [room(existing, run_dir, several_hosts), clock(existing)]


def existing_part(path: Path) -> Path:
    """The part of a path that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


def room(existing: Path, run_dir: Path, several_hosts: bool) -> Finding:
    """Free space, and whether the kind of file system can be shared.

    Args:
        existing: A folder on the file system of run.dir.
        run_dir: For the message.
        several_hosts: Whether the run has processes on others.
    """
    free, kind = shutil.disk_usage(existing).free, kind_of(existing)
    said = f"{run_dir}: writable, {free / GIB:.1f} GiB free{f', {kind}' if kind else ''}"
    if free < LEAST_ROOM:
        return Finding("run.dir", said, "wrong", "make room, or set run.dir to another file system")
    if several_hosts and kind in NEVER_SHARED:
        fix = "set run.dir to a file system that all hosts share: each would write its part of a checkpoint to its own"
        return Finding("run.dir", f"{said}, which is this host's alone", "wrong", fix)
    return Finding("run.dir", said)


def kind_of(path: Path, mounts: Path = MOUNTS) -> str:
    """The kind of a file system, such as nfs4; "" where that is not known.

    Args:
        path: A folder on it.
        mounts: The kernel's list of what is mounted.
    """
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found = [(fields[1].replace("\\040", " "), fields[2]) for fields in map(str.split, lines) if len(fields) > 2]
    real = path.resolve()
    above = [(place, kind) for place, kind in found if real.is_relative_to(place)]
    return max(above, key=lambda mounted: len(mounted[0]), default=("", ""))[1]


def clock(existing: Path) -> Finding:
    """This host's clock against the file system's, which stamps every file.

    Args:
        existing: A folder on the file system.
    """
    before = time.time()
    with tempfile.NamedTemporaryFile(dir=existing, prefix=".spmdkit-doctor-") as probe:
        stamped = os.stat(probe.name).st_mtime
    return skew(stamped - min(max(stamped, before), time.time()), "the file system of run.dir")


def skew(seconds: float, whose: str) -> Finding:
    """The finding of a clock that differs.

    Args:
        seconds: How much later it is than this host's.
        whose: Clock.
    """
    if abs(seconds) > MOST_SKEW:
        how = "ahead of" if seconds > 0 else "behind"
        said = f"that of {whose} is {abs(seconds):.0f} s {how} this host's, {socket.gethostname()}"
        return Finding("clock", said, "wrong", "let both follow the same time server (chrony, ntpd)")
    return Finding("clock", f"agrees with {whose}")


@contextmanager
def probe(run_dir: Path, rank: int) -> Iterator[str]:
    """Puts a file where the other processes should see it, for a `with` block.

    Args:
        run_dir: The folder; or what exists of it.
        rank: This process.

    Returns:
        Its name; "" where it could not be written.
    """
    path = existing_part(run_dir) / f".spmdkit-doctor-{socket.gethostname()}-{os.getpid()}-{rank}"
    try:
        path.write_text("", encoding="ascii")
        written = True
    except OSError:
        written = False
    try:
        yield path.name if written else ""
    finally:
        path.unlink(missing_ok=True)


def shared(run_dir: Path, names: Sequence[str], hosts: Sequence[str], seconds: float = WAIT_SECONDS) -> Finding:
    """Looks for the probes of all processes.

    Args:
        run_dir: The folder.
        names: Their files, by rank; "" = none was written.
        hosts: Their hosts, by rank.
        seconds: How long to wait for them.
    """
    existing, deadline = existing_part(run_dir), time.monotonic() + seconds
    while True:
        here = set(os.listdir(existing))
        missing = sorted({host for name, host in zip(names, hosts, strict=True) if name and name not in here})
        if not missing or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    if missing:
        fix = "mount the same file system on all hosts, or set run.dir to one that they share"
        said = f"files that {', '.join(missing)} wrote to {existing} are not to be seen on {socket.gethostname()}"
        return Finding("shared", said, "wrong", fix)
    return Finding("shared", f"all {len(names)} processes see the same {existing}")
