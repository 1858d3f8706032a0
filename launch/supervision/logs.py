"""The log of a rank: every byte that it prints, for as long as the file system takes them.

A log is for people; no run ends for want of it. What cannot be written is counted, said once, and noted in the log
where it goes on.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path

FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
"""Not to be blocked by a pipe that stands in the place of the file."""


class Log:
    """Appends to a file; several threads may."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        """Prepares a log; the file is opened by the first `write`.

        Args:
            path: The file, in a folder that is there.
            say: Gets a line where it cannot be written, once.
        """
        self._path = path
        self._say = say
        self._said = False
        self._file = -1
        self._lost = 0
        self._turn = threading.Lock()

    def write(self, data: bytes) -> None:
        """Appends bytes, or counts them as lost; raises nothing."""
        with self._turn:
            note = f"\n--- {self._lost:,} bytes are missing here ---\n".encode() if self._lost else b""
            if self._append(note):
                self._lost += len(data)
                return
            self._lost = self._append(data)

    def close(self) -> None:
        """Closes the file."""
        with self._turn:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1

    def _append(self, data: bytes) -> int:
        """Writes as much as is taken; gives the number of bytes that are left."""
        left = memoryview(data)
        try:
            if self._file < 0 and left:
                self._file = os.open(self._path, FLAGS, 0o644)
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            if not self._said:
                self._said = True
                self._say(
                    f"{self._path} cannot be written: {error.strerror}. The run goes on; its output is only here."
                )
        return len(left)
