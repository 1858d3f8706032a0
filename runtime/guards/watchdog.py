"""Detects a run without progress, names the process that blocks it, and ends the process so that the run restarts.

A process that hangs looks alive: its heartbeat continues, and the others wait for it in a collective forever. Therefore
each process notes its step and phase, and a thread that does not wait for devices publishes the note every second. If
nothing happens for longer than the phase may take:

    1. The first process that detects this notifies the others, and each process writes the stacks of all threads to
       stderr, and so to the log of its rank.
    2. The notes of all processes are compared, and the process that is behind, or has not published, is named.
    3. The process ends with exit code 75, and the launcher ends the others.

A process does not end the run while another one that it waits for is within a longer time limit: one that saves, while
the others wait for it in their next step.

A process that holds Python's lock, or is stopped, cannot publish, and the others name it; a timer of the interpreter,
which needs no lock, dumps its stacks.

If all are at the same step and phase, the batches of an evaluation and the current function distinguish them: a process
that runs the user's code while its devices have nothing to do blocks those that wait in functions of this package.

A program that fails on one device of a process, while its other devices wait for that one, ends the run with its own
error: an array of several devices is ready only when all of its parts are, so the thread that reads it would wait
forever.

With its note each process publishes the work of its steps, in which process 0 finds stragglers (see stragglers.py).
"""

import faulthandler
import json
import os
import socket
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

from ...configs.schema import Timeouts
from ...mesh.compat import coordination_client
from ...mesh.exit_codes import TRY_AGAIN
from ...mesh.known_causes import report_error
from ...mesh.processes import PREFIX
from ...training.steps.late_log import RUN_AHEAD
from ...training.times import Times
from .progress_notes import Deadlines, Note, verdict, without_service
from .stragglers import Stragglers, Work

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = __name__.partition(".")[0]
LIBRARIES = ("<frozen", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
"""Prefixes of the files of Python and of installed packages."""
WAITING_LIBRARIES = ("jax", "jaxlib", "orbax")
"""Packages whose functions wait for devices or for other processes."""
NOTES = f"{PREFIX}progress/"
STACKS = f"{PREFIX}stacks/"
"""The key under which a process requests the stacks of all."""
PUBLISH_SECONDS = 1.0
ANSWER_SECONDS = 2.0
"""The time limit for an answer of process 0, which stores the notes of all."""
LISTEN_SECONDS = 3.0
"""The time to listen for the others: a process that publishes nothing in that time cannot run Python."""
DUMP_AFTER_SECONDS = 5.0
"""The delay of the interpreter's own timer after the deadline: it dumps stacks only if the thread cannot."""
SECONDS_TO_RAISE = 3.0
"""The time for the training thread to find an error itself: it does if all devices of the process have failed."""

Item = TypeVar("Item")


class Unanswered(RuntimeError):
    """Process 0 did not answer in time."""


class ClientWithTimeout:
    """The methods of a coordination client; each raises `Unanswered` if no answer arrives in time."""

    def __init__(self, client: Any, seconds: float) -> None:
        """Wraps a client.

        Args:
            client: The client of the coordination service.
            seconds: The time limit for an answer.
        """
        self._client = client
        self._seconds = seconds
        self._answer: Future[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if self._answer is not None and not self._answer.done():
                raise Unanswered(f"process 0 has not answered an earlier {name}")
            answer = self._answer = Future()

            def ask() -> None:
                try:
                    answer.set_result(method(*arguments, **options))
                except Exception as error:
                    answer.set_exception(error)

            threading.Thread(target=ask, name="ask-process-0", daemon=True).start()
            if answer in wait([answer], self._seconds).not_done:
                raise Unanswered(f"process 0 did not answer within {self._seconds:.0f} s")
            return answer.result()

        return call


class Position(NamedTuple):
    """The position of a thread.

    Attributes:
        at: The function and its file, "measure (training/loop.py)", of this package or of the user's code; "" if the
            thread does not exist or runs only library code.
        is_user_code: True if it is the user's function, and not inside a call of JAX or Orbax, which may wait for
            other processes.
    """

    at: str = ""
    is_user_code: bool = False


def current_position(thread: int) -> Position:
    """Returns the position of a thread, identified by `threading.get_ident`."""
    frame = sys._current_frames().get(thread)
    may_wait = False
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        file = frame.f_code.co_filename
        if package == PACKAGE or not file.startswith(LIBRARIES):
            path = Path(file)
            shown = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
            return Position(f"{frame.f_code.co_name} ({shown})", package != PACKAGE and not may_wait)
        may_wait = may_wait or package in WAITING_LIBRARIES
        frame = frame.f_back
    return Position()


class FollowedStep:
    """A step that reports one array of every call, which no later call consumes."""

    def __init__(self, step: Any, add: Callable[[jax.Array], None]) -> None:
        """Wraps a step; `add` receives the arrays."""
        self._step, self._add = step, add

    def __call__(self, *arguments: Any) -> Any:
        """Runs the step."""
        state, metrics = self._step(*arguments)
        self._add(metrics.loss)
        return state, metrics

    def measure(self, *arguments: Any) -> Any:
        """Evaluates, as the step does."""
        sums = self._step.measure(*arguments)
        self._add(sums.total)
        return sums

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


class Results:
    """The latest results of the programs of this process, checked by a thread that does not wait for them."""

    def __init__(self) -> None:
        self._newest: deque[tuple[str, jax.Array]] = deque(maxlen=RUN_AHEAD + 2)
        self._failed_at: float | None = None

    def add(self, place: str, result: jax.Array) -> None:
        """Adds an array that a program is computing.

        Args:
            place: The step of the program, for the message.
            result: The array, which no later program consumes.
        """
        self._newest.append((place, result))

    def are_ready(self) -> bool:
        """Returns True if the devices of this process have computed all results, so that they wait for nobody."""
        return all(shard.data.is_ready() for _, result in list(self._newest) for shard in result.addressable_shards)

    def failure(self) -> RuntimeError | None:
        """Returns the oldest error once the training thread has had time to raise it; None if there is none.

        The message names the step, the device, its process and its host.
        """
        found = next((f"{place}, {error}" for place, result in list(self._newest) for error in _errors(result)), None)
        if found is None:
            return None
        self._failed_at = self._failed_at or time.monotonic()
        has_waited = time.monotonic() - self._failed_at >= SECONDS_TO_RAISE
        return jax.errors.JaxRuntimeError(found) if has_waited else None


def _errors(result: jax.Array) -> list[str]:
    """Returns the errors of the devices of this process that failed to compute their parts of an array."""
    errors = []
    for shard in result.addressable_shards:
        if shard.data.is_ready():
            try:
                shard.data.block_until_ready()
            except jax.errors.JaxRuntimeError as error:
                errors.append(f"{shard.device} of rank {jax.process_index()} on {socket.gethostname()}: {error}")
    return errors


class Watchdog:
    """The watchdog of one process of a run; `note` costs one assignment."""

    def __init__(
        self, timeouts: Timeouts, times: Times, work: Callable[[], Work | None], stragglers: Stragglers | None
    ) -> None:
        """Prepares the watchdog.

        Args:
            timeouts: The section `timeouts`.
            times: Receives every change of phase.
            work: Returns the work of the last steps of this process; called by the thread of the watchdog.
            stragglers: Compares the work of all processes, in process 0; None = it is not compared.
        """
        self._deadlines = Deadlines(timeouts)
        self._times, self._work, self._stragglers = times, work, stragglers
        self._doing: tuple[int, str, float, int] | None = None
        self._training = threading.get_ident()
        self._dumped = False
        self._results = Results()

    def follow(self, step: Any) -> Any:
        """Wraps a step: if it fails on one device of this process, its error ends the run."""

        def add(result: jax.Array) -> None:
            if self._doing is not None:
                number, phase = self._doing[:2]
                self._results.add(f"step {number}" if phase == "step" else f"step {number}, {phase}", result)

        return FollowedStep(step, add)

    def note(self, step: int, phase: str) -> None:
        """Notes progress: the phase that begins now."""
        self._doing = (step, phase, time.monotonic(), 0)
        self._times.switch(phase)

    def goes_on(self, items: Iterable[Item]) -> Iterator[Item]:
        """Wraps items, each of which is progress in the current phase."""
        for done, item in enumerate(items, 1):
            if self._doing is not None:
                self._doing = (*self._doing[:2], time.monotonic(), done)
            yield item

    def rest(self) -> None:
        """Notes that no progress is expected."""
        self._doing = None

    def batches(self, batches: Iterable[Item], start: int) -> Iterator[Item]:
        """Wraps batches: notes the wait for each one, and its step.

        Args:
            batches: The batches of the steps after `start`.
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
        """Watches a `with` block."""
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
            client = ClientWithTimeout(client, ANSWER_SECONDS)  # process 0 may be the one that is stopped
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
        position = current_position(self._training)
        is_free = position.is_user_code and self._results.are_ready()
        return Note(step, phase, time.monotonic() - since, done, position.at, is_free)

    def _set_timer(self, now: Note | None) -> None:
        """Lets the interpreter dump the stacks if this thread cannot run anymore."""
        seconds = self._deadlines.of(now)[0] if now else 0.0
        if seconds and sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(seconds + DUMP_AFTER_SECONDS, file=sys.__stderr__)

    def _talk(self, client: Any, now: Note | None) -> None:
        """Publishes the note of this process, and reads those of the others."""
        self._publish(client, now)
        if asking := [key.rpartition("/")[2] for key, _ in client.key_value_dir_get(STACKS)]:
            self._dump(f", asked for by rank {asking[0]}, which sees no progress")
        if self._stragglers is not None and jax.process_index() == 0:
            texts = _published(client)
            self._stragglers.compare([_as_work(texts.get(rank)) for rank in range(jax.process_count())])

    def _publish(self, client: Any, now: Note | None) -> None:
        """Publishes the note of this process; every text is new."""
        text = json.dumps([time.monotonic(), now or (0, "", 0.0), self._work()])
        client.key_value_set(f"{NOTES}{jax.process_index()}", text, allow_overwrite=True)

    def _dump(self, why: str = "") -> None:
        """Writes the stacks of all threads to stderr, once."""
        if self._dumped:
            return
        self._dumped = True
        print(f"--- stacks of rank {jax.process_index()}{why}", file=sys.stderr, flush=True)
        if sys.__stderr__ is not None:  # a replacement may have no file descriptor
            faulthandler.dump_traceback(file=sys.__stderr__)

    def _end_run(self, client: Any, now: Note) -> None:
        """Ends the run, unless another process delays it in a phase with a longer limit."""
        deadline = self._deadlines.of(now)
        message = verdict([now], [], *deadline) if client is None else self._find_verdict(client, now)
        again = self._now()
        if not message or again is None or not self._deadlines.passed(again):
            return
        faulthandler.cancel_dump_traceback_later()
        self._dump()
        print(f"error: {message}", file=sys.stderr, flush=True)
        os._exit(TRY_AGAIN)

    def _find_verdict(self, client: Any, now: Note) -> str:
        """Returns which process blocks the run, by the notes of all; "" if that process is within its limit."""
        deadline = time.monotonic() + LISTEN_SECONDS
        while True:
            try:
                if self._is_delayed_in_time(client, now):
                    return ""
                client.key_value_set(f"{STACKS}{jax.process_index()}", "", allow_overwrite=True)
                return verdict(*self._listen(client), *self._deadlines.of(now))
            except Exception:
                if time.monotonic() > deadline:
                    return without_service(now, jax.process_index(), *self._deadlines.of(now))
                time.sleep(PUBLISH_SECONDS / 2)

    def _is_delayed_in_time(self, client: Any, now: Note) -> bool:
        """Returns True if a process that is behind is within a longer limit of its phase."""
        notes = [_as_note(text) for rank, text in _published(client).items() if rank != jax.process_index()]
        return any(note and note.place <= now.place and self._deadlines.may_go_on(note, now) for note in notes)

    def _listen(self, client: Any) -> tuple[list[Note | None], list[int]]:
        """Returns the note of each rank, and the ranks that publish nothing new; clocks of hosts are not compared."""
        before, deadline = _published(client), time.monotonic() + LISTEN_SECONDS
        while time.monotonic() < deadline:
            self._publish(client, self._now())
            time.sleep(PUBLISH_SECONDS / 2)
        after = _published(client)
        silent = [rank for rank in range(jax.process_count()) if before.get(rank) == after.get(rank)]
        return [_as_note(after.get(rank)) for rank in range(jax.process_count())], silent


def _published(client: Any) -> dict[int, str]:
    return {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(NOTES)}


def _as_note(text: str | None) -> Note | None:
    return Note(*json.loads(text)[1]) if text else None


def _as_work(text: str | None) -> Work | None:
    work = json.loads(text)[2] if text else None
    return Work(*work) if work else None
