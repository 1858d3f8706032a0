"""Stopping between two steps, at the same step in every process, when a signal asks for it.

SIGTERM, SIGINT (Ctrl-C), SIGHUP and SIGUSR1 (a scheduler's warning) ask a run to end: it finishes the steps that it has
started, saves, and ends with a code that says "try again". A second signal of the kind ends it at once.

Processes get a signal at different times, or only one of them does, and their hosts are a few steps apart. So:

    1. Whoever gets the signal says so to all, over the coordination service.
    2. A thread of each process, which no device can hold up, closes the gate that every step passes, and tells the
       others which step this process started last.
    3. When all have told, the last of these steps is where all of them stop; whoever is behind goes on to it.

A host that waits for its devices, which wait for other hosts, is no obstacle: its thread answers, and those behind go
on.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax

from ..mesh.compat import coordination_client
from ..mesh.coordination import PREFIX
from .interrupts import SIGNALS, answered, asks_once

POLL_SECONDS = 0.25
ASKED, STARTED = f"{PREFIX}stop/asked", f"{PREFIX}stop/started/"


class Gate:
    """What every step passes before it starts, and who decides where it closes."""

    def __init__(self) -> None:
        self.reason = ""
        self._started = 0
        self._last: int | None = None
        self._closed = False
        self._change = threading.Condition()

    def passes(self, number: int) -> bool:
        """Tells whether a step may start; waits where that is not decided yet.

        Args:
            number: Of the step; steps come in order.
        """
        with self._change:
            while self._closed and self._last is None:
                self._change.wait()
            if self._last is not None and number > self._last:
                return False
            self._started = number
            return True

    def close(self) -> int:
        """Lets no further step start before it is decided which is the last; gives the last that was started."""
        with self._change:
            self._closed = True
            return self._started

    def stop_after(self, number: int, reason: str) -> None:
        """Decides which step is the last.

        Args:
            number: At least what `close` gave.
            reason: For people.
        """
        with self._change:
            self._closed, self._last, self.reason = True, number, reason
            self._change.notify_all()

    @property
    def is_closing(self) -> bool:
        """Whether a step will be the last one, known or not."""
        return self._closed


@contextmanager
def stops_on_signals() -> Iterator[Gate]:
    """Listens to signals for a `with` block that begins when the processes of the run have joined."""
    gate = Gate()
    listener = _Alone(gate) if coordination_client() is None else _Together(gate)
    if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
        yield gate
        return
    before: dict[Any, Any] = {}

    @asks_once
    def handle(number: int, frame: Any) -> None:
        answered(number)
        signal.signal(number, before[number])  # the next one is not ours
        listener.ask(signal.Signals(number).name)

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            before[number] = signal.signal(number, handle)
    listener.begin()
    try:
        yield gate
    finally:
        listener.end()
        for number, handler in before.items():
            signal.signal(number, handler)


class _Alone:
    """A run of one process: it stops after the step that it has started last."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def ask(self, reason: str) -> None:
        # Signal handlers run in the main thread, maybe within the gate: another thread waits for it.
        threading.Thread(target=lambda: self._gate.stop_after(self._gate.close(), reason), daemon=True).start()


class _Together:
    """A run of several: a thread that hears of every signal, and decides with the others."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._client: Any = coordination_client()
        self._asked = ""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="stop-with-the-others", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._end.set()
        self._thread.join()

    def ask(self, reason: str) -> None:
        self._asked = reason

    def _listen(self) -> None:
        told = False
        while not self._end.wait(POLL_SECONDS):
            with suppress(Exception):  # the service ends with process 0; then there is nobody to stop with
                if self._asked and not told:
                    told = True
                    text = f"{self._asked} to rank {jax.process_index()}"
                    self._client.key_value_set(ASKED, text, allow_overwrite=True)
                asked = dict(self._client.key_value_dir_get(ASKED.rpartition("/")[0]))
                reason = next((text for key, text in asked.items() if key == ASKED), "")
                if reason:
                    self._decide(reason)
                    return

    def _decide(self, reason: str) -> None:
        self._client.key_value_set(f"{STARTED}{jax.process_index()}", str(self._gate.close()))
        while not self._end.is_set():
            started = [int(number) for _, number in self._client.key_value_dir_get(STARTED)]
            if len(started) == jax.process_count():
                self._gate.stop_after(max(started), reason)
                return
            time.sleep(POLL_SECONDS / 5)
