"""Notices that a run makes no progress, says which process holds it up and where, and ends it so that it starts again.

A process that hangs looks alive: its heartbeat goes on, and the others wait for it in a collective for ever. So each
process notes what it is doing (step and phase), and a thread that no device holds up publishes the note every second.
Where nothing has happened for longer than the phase may take:

    1. the stacks of all threads go to stderr, and so to the log of the rank;
    2. the notes of all processes are compared: whoever is behind, or has not published, is named with its phase;
    3. the process ends with code 75, and the launcher ends the others.

A process that holds Python's lock, or is stopped, cannot publish, which is how the others name it; its own stacks are
dumped by a timer of the interpreter that needs no lock.
"""

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import jax

from ..mesh.compat import coordination_client
from ..mesh.coordination import PREFIX, ranks
from .exits import TRY_AGAIN

FOLDER = f"{PREFIX}progress/"
PUBLISH_SECONDS = 1.0
LISTEN_SECONDS = 3.0
"""How long to listen for the others: a process that publishes nothing in that time cannot run Python."""
DUMP_AFTER_SECONDS = 5.0
"""How much later than the deadline the interpreter's own timer dumps the stacks: only where the thread cannot."""

Item = TypeVar("Item")


class Note(NamedTuple):
    """What a process is doing.

    Attributes:
        step: the step under way, or the one it waits to begin.
        phase: "data", "step", "evaluation", "save".
        seconds: for how long.
    """

    step: int
    phase: str
    seconds: float

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}, for {self.seconds:.0f} s"


class Watchdog:
    """The watch over one process of a run; `note` costs an assignment."""

    def __init__(self, seconds: float) -> None:
        """Prepares a watch.

        Args:
            seconds: The longest that a phase may take without progress; 0 = for ever.
        """
        self._seconds = seconds
        self._doing: tuple[int, str, float] | None = None

    def note(self, step: int, phase: str) -> None:
        """Notes progress: what this process does from now on."""
        self._doing = (step, phase, time.monotonic())

    def goes_on(self, items: Iterable[Item]) -> Iterator[Item]:
        """The same items, each of which is progress in the phase under way."""
        for item in items:
            if self._doing is not None:
                self.note(*self._doing[:2])
            yield item

    def rest(self) -> None:
        """Notes that nothing is under way that should make progress."""
        self._doing = None

    def batches(self, batches: Iterable[Item], start: int) -> Iterator[Item]:
        """The same batches; notes when one is waited for, and when its step is under way.

        Args:
            batches: Of the steps after `start`.
            start: Steps done.
        """
        self.note(start + 1, "data")
        for number, batch in enumerate(batches, start + 1):
            self.note(number, "step")
            yield batch
            self.note(number + 1, "data")

    @contextmanager
    def phase(self, step: int, phase: str) -> Iterator[None]:
        """Notes a phase between two steps."""
        self.note(step, phase)
        yield
        self.note(step, "step")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches for a `with` block."""
        end = threading.Event()
        thread = threading.Thread(target=self._watch, args=(end,), name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.rest()
            end.set()
            thread.join()
            faulthandler.cancel_dump_traceback_later()

    def _watch(self, end: threading.Event) -> None:
        client = coordination_client()
        while not end.wait(PUBLISH_SECONDS):
            now = self._now()
            if self._seconds and sys.__stderr__ is not None:
                faulthandler.dump_traceback_later(self._seconds + DUMP_AFTER_SECONDS, file=sys.__stderr__)
            if client is not None:
                with suppress(Exception):  # the service ends with process 0
                    _publish(client, now)
            if now is not None and self._seconds and now.seconds > self._seconds and not end.is_set():
                self._end_run(client, now)

    def _now(self) -> Note | None:
        doing = self._doing
        return Note(doing[0], doing[1], time.monotonic() - doing[2]) if doing else None

    def _end_run(self, client: Any, now: Note) -> None:
        faulthandler.cancel_dump_traceback_later()
        notes, silent = ([now], []) if client is None else self._listen(client)
        print(f"--- stacks of rank {jax.process_index()}", file=sys.stderr, flush=True)
        if sys.__stderr__ is not None:  # the process's own: what stands in its place may have no file descriptor
            faulthandler.dump_traceback(file=sys.__stderr__)
        print(f"error: {verdict(notes, silent, self._seconds)}", file=sys.stderr, flush=True)
        os._exit(TRY_AGAIN)

    def _listen(self, client: Any) -> tuple[list[Note | None], list[int]]:
        """What each rank does, and which publish nothing new; clocks of hosts are not compared."""
        before, deadline = _published(client), time.monotonic() + LISTEN_SECONDS
        while time.monotonic() < deadline:
            _publish(client, self._now())
            time.sleep(PUBLISH_SECONDS / 2)
        after = _published(client)
        silent = [rank for rank in range(jax.process_count()) if before.get(rank) == after.get(rank)]
        return [_as_note(after.get(rank)) for rank in range(jax.process_count())], silent


def verdict(notes: Sequence[Note | None], silent: Sequence[int], seconds: float) -> str:
    """Says who holds a run up.

    Args:
        notes: What each rank does; None of a rank that has published nothing.
        silent: Ranks that publish nothing any more.
        seconds: The longest that a phase may take.
    """
    said = f"No progress for more than {seconds:.0f} s (timeouts.step)"
    again = "The same command goes on from the newest checkpoint."
    if len(notes) == 1:
        return f"{said}: {notes[0]}. The stacks of all threads are above. {again}"
    if silent:
        last = f"at {notes[silent[0]]}" if notes[silent[0]] else "before its first step"
        return (
            f"{said}: {ranks(silent)} {last}, no longer answer{'s' if len(silent) == 1 else ''}: stopped, dead, or "
            f"Python's lock is held there. {_others(notes, silent)} {again}"
        )
    present = [note for note in notes if note is not None]
    first = min(_place(note) for note in present)
    behind = [each for each, note in enumerate(notes) if note is not None and _place(note) == first]
    if len(behind) == len(notes):
        return f"{said}: all ranks are at {notes[0]}: see the stacks in their logs. {again}"
    return f"{said}: {ranks(behind)} at {notes[behind[0]]}. {_others(notes, behind)} {again}"


def _place(note: Note) -> tuple[int, int]:
    """How far a rank has come: to wait for data is before the step, what comes between two steps is after it."""
    return note.step, ("data", "step").index(note.phase) if note.phase in ("data", "step") else 2


def _others(notes: Sequence[Note | None], named: Sequence[int]) -> str:
    others = [each for each in range(len(notes)) if each not in named]
    if not others:
        return ""
    return f"{ranks(others).capitalize()} wait{'s' if len(others) == 1 else ''} at {notes[others[0]]}."


def _publish(client: Any, now: Note | None) -> None:
    """Gives this process's note to the others; every text is new."""
    text = json.dumps([time.monotonic(), *(now or (0, "", 0.0))])
    client.key_value_set(f"{FOLDER}{jax.process_index()}", text, allow_overwrite=True)


def _published(client: Any) -> dict[int, str]:
    return {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(FOLDER)}


def _as_note(text: str | None) -> Note | None:
    return Note(*json.loads(text)[1:]) if text else None
