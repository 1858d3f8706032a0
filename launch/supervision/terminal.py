"""What the launcher prints, from a thread of its own: a terminal that stands still holds no process of the run up.

Processes wait for whoever reads their output. A reader that is slow or stopped (Ctrl-S, a pager, a full pipe) would
make the run slow or stop it. So text waits here, up to a few megabytes; then lines are left out, and their number is
said.
"""

import os
import threading
from collections import deque
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Self, TextIO

from ...mesh.text import printable

MOST_WAITING = 4 << 20
"""Characters."""
SAYS = "spmdkit launch: "


class Terminal:
    """A text stream that never makes its writer wait."""

    def __init__(
        self,
        out: TextIO,
        turn: AbstractContextManager[Any] | None = None,
        most: int = MOST_WAITING,
        *,
        is_stderr: bool = False,
    ) -> None:
        """Begins to write to a stream.

        Args:
            out: The stream.
            turn: Held while something is written.
            most: Characters that may wait.
            is_stderr: Whether it gets what processes print to their stderr.
        """
        self.is_stderr = is_stderr
        self._out = out
        self._turn: AbstractContextManager[Any] = turn or threading.Lock()
        self._most = most
        self._waiting: deque[str] = deque()
        self._size = 0
        self._left_out = 0
        self._closing = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)
        self._thread.start()

    def isatty(self) -> bool:
        """Whether somebody looks at it."""
        return self._out.isatty()

    def write(self, text: str) -> None:
        """Takes whole lines to be written, or leaves them out where too much waits; raises nothing."""
        with self._change:
            if self._size and self._size + len(text) > self._most:
                self._left_out += text.count("\n")
                return
            self._put(self._note() + text)

    def close(self, seconds: float) -> None:
        """Waits until all is written, for so long as that goes on.

        Args:
            seconds: Without progress, after which the rest is dropped.
        """
        with self._change:
            self._put(self._note())
            self._closing = True
            while self._size and self._change.wait(seconds):
                pass
            self._waiting.clear()

    def _put(self, text: str) -> None:
        if text:
            self._waiting.append(text)
            self._size += len(text)
        self._change.notify_all()

    def _note(self) -> str:
        number, self._left_out = self._left_out, 0
        return (
            f"{SAYS}{number:,} lines are left out here, this output is slower; the logs have them\n" if number else ""
        )

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._waiting and not self._closing:
                    self._change.wait()
                if not self._waiting:
                    return
                text = self._waiting.popleft()
            try:
                with self._turn:
                    self._out.write(text)
                    self._out.flush()
            except (OSError, ValueError):  # it is full, gone or closed; the logs have it all
                pass
            with self._change:
                self._size -= len(text)
                self._change.notify_all()


class Voice:
    """What one process says on a terminal, until it is silenced."""

    def __init__(self, terminal: Terminal) -> None:
        """Speaks on a terminal."""
        self.is_silent = False
        self.is_stderr = terminal.is_stderr
        self._terminal = terminal

    def isatty(self) -> bool:
        """Whether somebody looks at the terminal."""
        return self._terminal.isatty()

    def write(self, text: str) -> None:
        """Takes whole lines to be written."""
        if not self.is_silent:
            self._terminal.write(text)


class Screen(NamedTuple):
    """Where the launcher prints.

    Attributes:
        out: What processes print to their stdout.
        err: The same of stderr, and what the launcher says.
    """

    out: Terminal
    err: Terminal

    @classmethod
    def of(cls, out: TextIO, err: TextIO) -> Self:
        """Begins to write to two streams, which take turns: they may be one terminal."""
        turn = threading.Lock() if _same(out, err) else None
        return cls(Terminal(out, turn), Terminal(err, turn, is_stderr=True))

    def say(self, line: str) -> None:
        """Prints a line of the launcher."""
        self.err.write(f"{SAYS}{printable(line)}\n")

    def close(self, seconds: float) -> None:
        """Waits until all is written, see `Terminal.close`."""
        self.out.close(seconds)
        self.err.close(seconds)


def _same(one: TextIO, other: TextIO) -> bool:
    """Whether two streams lead to one place."""
    try:
        return os.path.sameopenfile(one.fileno(), other.fileno())
    except (OSError, ValueError):
        return False
