"""A folder of compiled programs that many processes and hosts read and write at once.

A program is one file: 32 bytes of SHA-256, then the bytes that JAX gives. It is written beside its name and renamed, so
that nobody reads half of it; where its hash does not fit (a full disk, a cut file, a flipped byte) it counts as not
there, and is written anew. The folder stays below a size: what was not read for longest goes first, and what was read
or written within the last hour stays, as a run that starts may be about to read it.

In a run of several processes the keys that all of them see are given. Other keys have no program then, and one of these
that cannot be read is no reason to compile, but to end: the others may have read it (`sharing.py` says why that hangs).

(JAX's own store writes in place, does not look at what it reads but for what the compression notices, and never
replaces a damaged file. Hence this.)
"""

import hashlib
import os
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

SUFFIX = ".program"
HASH_BYTES = 32
MOST_BYTES = 8 << 30
RECENT_SECONDS = 3600.0
LEFT_OVER, LEFT_OVER_SECONDS = (".partial", ".mark"), 86400.0
"""What a killed process leaves; see `sharing.py` for the marks."""


class ProgramLost(BaseException):
    """A program that this run has agreed to read cannot be read; the same command may work, as it compiles.

    No `Exception`: JAX turns those of its cache into warnings, and compiles.
    """

    exit_code = 75


class ProgramStore:
    """Programs by key, as `mesh.compat.keep_programs` takes it.

    Args:
        folder: Where they are; it exists.
        say: Told once of a folder that cannot be read or written, and of each damaged program.
        most_bytes: Size of the folder, above which programs are removed.
        shared: The keys that every process of this run sees; None = any key is looked for.
    """

    def __init__(
        self,
        folder: Path,
        say: Callable[[str], None],
        most_bytes: int = MOST_BYTES,
        shared: frozenset[str] | None = None,
    ) -> None:
        self._path = self.folder = folder
        self._say, self._most_bytes, self._shared = say, most_bytes, shared
        self._lock, self._told = threading.Lock(), False

    def get(self, key: str) -> bytes | None:
        """The program of a key; None where there is none that is whole.

        Raises:
            ProgramLost: All processes of the run were to read it.
        """
        if self._shared is None:
            return self._read(key)
        if key not in self._shared:
            return None
        if (value := self._read(key)) is None:
            raise self._lost(self._file(key))
        return value

    def keys(self) -> frozenset[str]:
        """The keys of what is there; none where the folder cannot be read."""
        with suppress(OSError):
            return frozenset(name.removesuffix(SUFFIX) for name in os.listdir(self.folder) if name.endswith(SUFFIX))
        return frozenset()

    def _read(self, key: str) -> bytes | None:
        path = self._file(key)
        try:
            found = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            return self._unusable("read", error)
        value = found[HASH_BYTES:]
        if hashlib.sha256(value).digest() != found[:HASH_BYTES]:
            self._say(f"compilation: {path} is damaged; the program is compiled anew, and the file replaced.")
            return None
        with suppress(OSError):
            os.utime(path)  # read last now
        return value

    def put(self, key: str, value: bytes) -> None:
        """Keeps a program, in place of one of the same key; where it cannot be written, says so once."""
        partial = self.folder / f"{uuid.uuid4().hex}.partial"
        try:
            partial.write_bytes(hashlib.sha256(value).digest() + value)
            partial.replace(self._file(key))
            self._make_room()
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            self._unusable("written to", error)

    def size(self) -> tuple[int, int]:
        """How many programs are kept, and their bytes."""
        sizes = [size for _, size, _ in self._kept()]
        return len(sizes), sum(sizes)

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"

    def _kept(self) -> list[tuple[float, int, Path]]:
        """When each file was last read, its bytes and its path; another process may remove one meanwhile."""
        kept = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            with suppress(FileNotFoundError):
                found = path.stat()
                kept.append((found.st_mtime, found.st_size, path))
        return sorted(kept)

    def _make_room(self) -> None:
        self._sweep()
        kept, recent = self._kept(), time.time() - RECENT_SECONDS
        too_many = sum(size for _, size, _ in kept) - self._most_bytes
        for read, size, path in kept:
            if too_many <= 0 or read > recent:
                return
            path.unlink(missing_ok=True)
            too_many -= size

    def _sweep(self) -> None:
        """Removes what processes that were killed have left half written or marked, a day later."""
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):
                if path.suffix in LEFT_OVER and path.stat().st_mtime < time.time() - LEFT_OVER_SECONDS:
                    path.unlink()

    def _lost(self, path: Path) -> ProgramLost:
        """Removes what is left of it, so that the next start compiles."""
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return ProgramLost(
            f"the compiled program {path} was there when this run started, and cannot be read now. The other processes "
            "may have read it, and would never help to compile it. It is removed: the same command compiles it. Where "
            "this comes back, set run.cache to another folder, or to none."
        )

    def _unusable(self, verb: str, error: OSError) -> None:
        with self._lock:
            told, self._told = self._told, True
        if not told:
            why = error.strerror or type(error).__name__
            self._say(
                f"warning: the folder of compiled programs {self.folder} cannot be {verb} ({why}); programs are "
                "compiled anew. Set run.cache to another folder, or to none."
            )
