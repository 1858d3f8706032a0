"""Runs several processes' use of files in an order chosen by a seed, as threads that wait at events of the interpreter.

A step ends before each opening, renaming, linking and removal of a file; a process may be killed between two steps.
"""

import os
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path

EVENTS = ("open", "os.rename", "os.remove", "os.link")
_of_thread = threading.local()


class Killed(BaseException):
    """Ends a process between two steps."""


class Turn:
    """One process: runs until its next step, then waits until it is its turn again."""

    def __init__(self, folder: Path, run: Callable[[], None]) -> None:
        self.folder = str(folder)
        self.is_done = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._kill = False
        self._thread = threading.Thread(target=self._run, args=(run,), daemon=True)
        self._thread.start()

    def step(self, *, kill: bool = False) -> None:
        """Lets it go on until its next step or its end."""
        self._kill = kill
        self._go.release()
        self._back.acquire()

    def wait(self) -> None:
        """Called by the process, before a step."""
        self._back.release()
        self._go.acquire()
        if self._kill:
            self._kill = False
            raise Killed

    def _run(self, run: Callable[[], None]) -> None:
        self._go.acquire()
        _of_thread.turn = self
        try:
            run()
        finally:
            _of_thread.turn = None
            self.is_done = True
            self._back.release()


def pass_turn() -> None:
    """Ends a step of the process that calls it, which waits for another one."""
    _of_thread.turn.wait()


def _heard(event: str, arguments: tuple) -> None:
    turn = getattr(_of_thread, "turn", None) if event in EVENTS else None
    if turn is not None and isinstance(arguments[0], str | os.PathLike) and str(arguments[0]).startswith(turn.folder):
        turn.wait()


sys.addaudithook(_heard)


def interleave(folder: Path, runs: list[Callable[[], None]], chance: random.Random, kills: int) -> None:
    """Runs all to their ends, one step of one of them at a time."""
    turns = [Turn(folder, run) for run in runs]
    while under_way := [turn for turn in turns if not turn.is_done]:
        kill = kills > 0 and chance.random() < 0.1
        kills -= kill
        chance.choice(under_way).step(kill=kill)
