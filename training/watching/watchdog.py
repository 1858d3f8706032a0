"""Notices that a run makes no progress, says which process holds it up and where, and ends it so that it starts again.

A process that hangs looks alive: its heartbeat goes on, and the others wait for it in a collective for ever. So each
process notes what it is doing (step and phase), and a thread that no device holds up publishes the note every second.
Where nothing has happened for longer than the phase may take:

    1. whoever notices tells the others, and in every process the stacks of all threads go to stderr, and so to the log
       of its rank;
    2. the notes of all processes are compared: whoever is behind, or has not published, is named with its phase;
    3. the process ends with code 75, and the launcher ends the others.

Nobody ends a run because of a process whose own phase may take longer and has not: one that saves, while the others
wait for it in their next step.

A process that holds Python's lock, or is stopped, cannot publish, which is how the others name it; its own stacks are
dumped by a timer of the interpreter that needs no lock.

Where all are at the same step and phase, the batches of an evaluation and the function that each is in tell them apart.

A program that fails on one device of a process, while its other devices wait for that one, ends the run with its own
error (see failures.py).

With its note each process publishes how its steps went, from which process 0 finds the slow ones (see stragglers.py).
"""

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import jax

from ...mesh.compat import coordination_client
from ...mesh.coordination import PREFIX
from ..ending.exits import TRY_AGAIN, report_error
from ..times import Times
from .answering import Answering
from .failures import Followed, Results
from .notes import Note, verdict, without_service
from .stragglers import Stragglers, Work
from .where import where

FOLDER = f"{PREFIX}progress/"
STACKS = f"{PREFIX}stacks/"
"""Where a process says that all shall dump their stacks."""
PUBLISH_SECONDS = 1.0
ANSWER_SECONDS = 2.0
"""How long process 0, which keeps the notes of all, may take to answer."""
LISTEN_SECONDS = 3.0
"""How long to listen for the others: a process that publishes nothing in that time cannot run Python."""
DUMP_AFTER_SECONDS = 5.0
"""How much later than the deadline the interpreter's own timer dumps the stacks: only where the thread cannot."""

Item = TypeVar("Item")


class Watchdog:
    """The watch over one process of a run; `note` costs an assignment."""

    def __init__(
        self,
        seconds: float,
        by_phase: Mapping[str, float] | None = None,
        *,
        times: Times | None = None,
        work: Callable[[], Work | None] = lambda: None,
        stragglers: Stragglers | None = None,
    ) -> None:
        """Prepares a watch.

        Args:
            seconds: The longest that a phase may take without progress; 0 = for ever.
            by_phase: The same for "first_step", "evaluation" and "save" where it is another; 0 = as `seconds`.
            times: Gets every change of phase.
            work: How the last steps of this process went; asked by the thread that watches.
            stragglers: Looks at how those of all went, in process 0.
        """
        self._deadlines = _Deadlines(seconds, dict(by_phase or {}))
        self._times = times or Times("")
        self._work = work
        self._stragglers = stragglers
        self._doing: tuple[int, str, float, int] | None = None
        self._training = threading.get_ident()
        self._dumped = False
        self._results = Results()

    def follow(self, step: Any) -> Any:
        """The same step; if it fails on one device of this process, its error ends the run."""

        def add(result: jax.Array) -> None:
            if self._doing is not None:
                number, phase = self._doing[:2]
                self._results.add(f"step {number}" if phase == "step" else f"step {number}, {phase}", result)

        return Followed(step, add)

    def note(self, step: int, phase: str) -> None:
        """Notes progress: what this process does from now on."""
        self._doing = (step, phase, time.monotonic(), 0)
        self._times.switch(phase)

    def goes_on(self, items: Iterable[Item]) -> Iterator[Item]:
        """The same items, each of which is progress in the phase under way."""
        for done, item in enumerate(items, 1):
            if self._doing is not None:
                self._doing = (*self._doing[:2], time.monotonic(), done)
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
        self._deadlines.first = start + 1
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
        end, self._training = threading.Event(), threading.get_ident()
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
        if client is not None:
            client = Answering(client, ANSWER_SECONDS)  # it waits for process 0, which may be what is stopped
        while not end.wait(PUBLISH_SECONDS):
            now = self._now()
            self._set_timer(now)
            if client is not None:
                with suppress(Exception):  # the service ends with process 0
                    self._talk(client, now)
            failure = self._results.failure() if now else None
            if failure is not None and not end.is_set():
                code = report_error(failure)
                sys.stderr.flush()
                os._exit(code)
            if now is not None and self._deadlines.passed(now) and not end.is_set():
                self._end_run(client, now)

    def _now(self) -> Note | None:
        doing = self._doing
        if doing is None:
            return None
        step, phase, since, done = doing
        return Note(step, phase, time.monotonic() - since, done, where(self._training))

    def _set_timer(self, now: Note | None) -> None:
        """Lets the interpreter dump the stacks where this thread cannot run any more."""
        seconds = self._deadlines.of(now)[0] if now else 0.0
        if seconds and sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(seconds + DUMP_AFTER_SECONDS, file=sys.__stderr__)

    def _talk(self, client: Any, now: Note | None) -> None:
        """Tells the others what this process does, and hears what they say."""
        self._publish(client, now)
        asking = [key.rpartition("/")[2] for key, _ in client.key_value_dir_get(STACKS)]
        if asking:
            self._dump(f", asked for by rank {asking[0]}, which sees no progress")
        if self._stragglers is not None and jax.process_index() == 0:
            found = _published(client)
            self._stragglers.look([_as_work(found.get(rank)) for rank in range(jax.process_count())])

    def _publish(self, client: Any, now: Note | None) -> None:
        """Gives this process's note to the others; every text is new."""
        text = json.dumps([time.monotonic(), now or (0, "", 0.0), self._work()])
        client.key_value_set(f"{FOLDER}{jax.process_index()}", text, allow_overwrite=True)

    def _dump(self, why: str = "") -> None:
        """Writes the stacks of all threads to the process's own stderr, once."""
        if self._dumped:
            return
        self._dumped = True
        print(f"--- stacks of rank {jax.process_index()}{why}", file=sys.stderr, flush=True)
        if sys.__stderr__ is not None:  # what stands in its place may have no file descriptor
            faulthandler.dump_traceback(file=sys.__stderr__)

    def _end_run(self, client: Any, now: Note) -> None:
        """Ends the run, unless another process holds it up in a phase that may take longer."""
        said = verdict([now], [], *self._deadlines.of(now)) if client is None else self._what_is_known(client, now)
        again = self._now()
        if not said or again is None or not self._deadlines.passed(again):
            return
        faulthandler.cancel_dump_traceback_later()
        self._dump()
        print(f"error: {said}", file=sys.stderr, flush=True)
        os._exit(TRY_AGAIN)

    def _what_is_known(self, client: Any, now: Note) -> str:
        """Says who holds the run up, as the notes of all tell; "" where it is in time."""
        deadline = time.monotonic() + LISTEN_SECONDS
        while True:
            try:
                if self._is_held_up_in_time(client, now):
                    return ""
                client.key_value_set(f"{STACKS}{jax.process_index()}", "", allow_overwrite=True)
                return verdict(*self._listen(client), *self._deadlines.of(now))
            except Exception:
                if time.monotonic() > deadline:
                    return without_service(now, jax.process_index(), *self._deadlines.of(now))
                time.sleep(PUBLISH_SECONDS / 2)

    def _is_held_up_in_time(self, client: Any, now: Note) -> bool:
        """Whether a process that is behind has a longer deadline for what it does, and keeps it."""
        notes = [_as_note(text) for rank, text in _published(client).items() if rank != jax.process_index()]
        return any(note and note.place <= now.place and self._deadlines.may_go_on(note, now) for note in notes)

    def _listen(self, client: Any) -> tuple[list[Note | None], list[int]]:
        """What each rank does, and which publish nothing new; clocks of hosts are not compared."""
        before, deadline = _published(client), time.monotonic() + LISTEN_SECONDS
        while time.monotonic() < deadline:
            self._publish(client, self._now())
            time.sleep(PUBLISH_SECONDS / 2)
        after = _published(client)
        silent = [rank for rank in range(jax.process_count()) if before.get(rank) == after.get(rank)]
        return [_as_note(after.get(rank)) for rank in range(jax.process_count())], silent


class _Deadlines:
    """How long what may take."""

    def __init__(self, seconds: float, by_phase: Mapping[str, float]) -> None:
        self.first = 1
        self._seconds = seconds
        self._by_phase = by_phase

    def of(self, note: Note) -> tuple[float, str]:
        """The longest that what a note says may take, 0 = for ever, and the key of the config that says so."""
        first = note.step == self.first and note.phase in ("data", "step")
        name = "first_step" if first else note.phase
        own = self._by_phase.get(name, 0)
        return (own, f"timeouts.{name}") if own else (self._seconds, "timeouts.step")

    def passed(self, note: Note) -> bool:
        """Whether it has taken longer."""
        seconds, _ = self.of(note)
        return 0 < seconds < note.seconds

    def may_go_on(self, note: Note, waiting: Note) -> bool:
        """Whether a process is within its own deadline, a longer one than that of who waits for it."""
        seconds, shorter = self.of(note)[0], self.of(waiting)[0]
        return (seconds == 0 or seconds > shorter) and not self.passed(note)


def _published(client: Any) -> dict[int, str]:
    return {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(FOLDER)}


def _as_note(text: str | None) -> Note | None:
    return Note(*json.loads(text)[1]) if text else None


def _as_work(text: str | None) -> Work | None:
    work = json.loads(text)[2] if text else None
    return Work(*work) if work else None
