"""Stops and pauses at the same step in every process: stops for signals, pauses for callbacks.

SIGTERM, SIGINT (Ctrl-C), SIGHUP and SIGUSR1 (a scheduler's warning) stop a run: it finishes the steps that it has
started, saves, and exits with code 75, try again. A second signal ends it at once. Callbacks request a pause to
evaluate, save, or stop (see callbacks/callback.py).

Processes get a signal at different times, or only one of them does, and their hosts are a few steps apart. Therefore:

    1. A process publishes its request over the coordination service. Every process may publish a signal; only process 0
       publishes the requests of callbacks, one at a time.
    2. A thread of each process, which devices cannot block, closes the gate that every step passes, and publishes the
       last step that this process has started.
    3. When all have published it, the run stops after the largest of these steps, or pauses after the next one; the
       processes that are behind continue up to it.

This also works if a host waits for its devices, which wait for other hosts: its thread answers, and those behind
continue.

A run that goes back to a checkpoint (`Gate.go_back`) discards all of this, because step numbers are reused: requests of
callbacks are dropped, and a requested stop happens at once.
"""

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Self

import jax

from ...mesh.compat import coordination_client
from ...mesh.processes import PREFIX, exchange, print_progress
from .interrupts import SIGNALS, answered, asks_once

POLL_SECONDS = 0.25
DECIDING_SECONDS = 0.05
"""The polling interval while the gate is closed."""
FOLDER = f"{PREFIX}turns/"
ASKED, STARTED = f"{FOLDER}asked/", f"{FOLDER}started/"
STOP = "stop"
"""The name of a request by a signal; requests of callbacks are numbered."""


class Gate:
    """Every step passes the gate before it starts; the gate closes after the last step of a run."""

    def __init__(self) -> None:
        self.reason = ""
        self._started = 0
        self._last: int | None = None
        self._undecided: set[str] = set()
        self._pauses: dict[int, list[str]] = {}
        self._dropped = 0
        self._change = threading.Condition()
        self.ask: Callable[[str], None] = lambda text: self.pause_after(self.close("alone") + 1, text, name="alone")
        """Requests a pause as soon as possible; returns at once. Only process 0 may call this."""
        self.last_request: Callable[[], int] = lambda: 0

    def passes(self, number: int) -> bool:
        """Returns whether a step may start; waits until that is decided.

        Args:
            number: The number of the step; steps come in order.
        """
        with self._change:
            while self._undecided:
                self._change.wait()
            if self._last is not None and number > self._last:
                return False
            self._started = number
            return True

    def close(self, name: str = STOP) -> int:
        """Blocks further steps until a request is decided; returns the last step that was started.

        Args:
            name: The name of the request.
        """
        with self._change:
            self._undecided.add(name)
            return self._started

    def stop_after(self, number: int, reason: str) -> None:
        """Sets the last step of the run; of two calls, the smaller number counts.

        Args:
            number: The result of `close` or more; without `close`, the current step of all processes.
            reason: The reason, for people.
        """
        with self._change:
            self._undecided.discard(STOP)
            if self._last is None or number < self._last:
                self._last, self.reason = number, reason
            self._change.notify_all()

    def pause_after(self, number: int, *texts: str, name: str = "") -> None:
        """Sets the step after which the run pauses.

        Args:
            number: More than the result of `close`.
            texts: The requests, which `asked_at` then returns.
            name: The argument of `close`.
        """
        with self._change:
            self._undecided.discard(name)
            if not (name.isdigit() and int(name) <= self._dropped):
                self._pauses.setdefault(number, []).extend(texts)
            self._change.notify_all()

    def asked_at(self, number: int) -> list[str]:
        """Returns the requests for which all processes pause after a step that has passed the gate."""
        return self._pauses.get(number, [])  # for a step that has passed, everything is decided

    def go_back(self, number: int, name: str, seconds: float) -> None:
        """Continues from an earlier step, without the requests since then. All processes call this, and none trains.

        If any of them has a request to stop, the earlier step is the last one.

        Args:
            number: The number of that step, the same in all processes.
            name: A unique name for the exchange between the processes.
            seconds: How long to wait for the other processes.

        Raises:
            ProcessesMissing: Some processes did not respond in time.
        """
        last_request = self.last_request()
        with self._change:
            self._started = number  # answers to requests from now on use this number
            state = json.dumps([self.is_closing, self.reason, last_request])
        texts = [json.loads(each) for each in exchange(name, state, seconds=seconds)]
        with self._change:
            self._pauses.clear()
            self._dropped = texts[0][2]  # that of process 0; others may decide these requests later
        if any(is_closing for is_closing, _, _ in texts):
            self.stop_after(number, next((reason for _, reason, _ in texts if reason), "a signal"))

    @property
    def is_closing(self) -> bool:
        """True if the run stops, even if its last step is not decided yet."""
        return STOP in self._undecided or self._last is not None


@contextmanager
def stops_on_signals() -> Iterator[Gate]:
    """Handles signals within a `with` block that begins when the processes of the run have connected.

    Only the main thread gets signals; in other threads, this only follows the other processes.
    """
    gate = Gate()
    together = _Together(gate) if coordination_client() is not None else None
    before: dict[Any, Any] = {}

    @asks_once
    def handle(number: int, frame: Any) -> None:
        answered(number)
        signal.signal(number, before[number])  # the next one ends the process
        name = signal.Signals(number).name
        if together is not None:
            together.ask(name)
        else:  # the main thread, which runs this, may hold the lock of the gate; another thread can wait for it
            threading.Thread(target=lambda: gate.stop_after(gate.close(), name), daemon=True).start()

    for number in SIGNALS if threading.current_thread() is threading.main_thread() else ():
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            before[number] = signal.signal(number, handle)
    try:
        with together or nullcontext():
            yield gate
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Together:
    """Requests in a run of several processes: a thread reads all requests, and decides with the other processes."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._client: Any = coordination_client()
        self._signal = ""
        self._pauses: list[str] = []
        self._number = 0
        self._publishing = threading.Lock()
        self._undecided: dict[str, str] = {}
        self._seen: set[str] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="stop-together", daemon=True)
        gate.ask, gate.last_request = self._pauses.append, self._drop_pauses

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def ask(self, reason: str) -> None:
        self._signal = f"{reason} to rank {jax.process_index()}"

    def _listen(self) -> None:
        while not self._end.wait(DECIDING_SECONDS if self._undecided else POLL_SECONDS):
            with suppress(Exception):  # the service ends with process 0; then no process is left to stop with
                self._poll()

    def _poll(self) -> None:
        """Publishes own requests, decides those that all have answered, and answers new ones, in this order."""
        with self._publishing:
            self._publish()
        asked = {key.removeprefix(ASKED): text for key, text in self._client.key_value_dir_get(ASKED)}
        for name, text in list(self._undecided.items()):
            self._decide(name, text)
        for name in asked.keys() - self._seen:
            self._answer(name, asked[name])

    def _publish(self) -> None:
        """Publishes the requests of this process."""
        if self._signal:
            self._client.key_value_set(f"{ASKED}{STOP}", self._signal, allow_overwrite=True)
            if STOP not in self._seen:  # the launcher parses this line, see supervision/blame.py
                print_progress(
                    f"got {self._signal.partition(' ')[0]}: all processes of the run stop after the same step"
                )
            self._signal = ""
        is_free = not self._number or (str(self._number) in self._seen and str(self._number) not in self._undecided)
        if self._pauses and is_free and jax.process_index() == 0:
            pauses = list(self._pauses)  # the training thread may be adding to it
            self._client.key_value_set(f"{ASKED}{self._number + 1}", json.dumps(pauses))
            self._number += 1
            del self._pauses[: len(pauses)]

    def _drop_pauses(self) -> int:
        """Drops requests that are not published yet; returns the number of the last published one."""
        with self._publishing:
            self._pauses.clear()
            return self._number

    def _answer(self, name: str, text: str) -> None:
        """Closes the gate for a new request, and publishes the last step that this process has started.

        Several requests may exist at once, and processes may see them in any order: each is answered as soon as it is
        seen, so that two processes never wait for each other.
        """
        started = self._gate.close(name)
        self._client.key_value_set(f"{STARTED}{name}/{jax.process_index()}", str(started), allow_overwrite=True)
        self._seen.add(name)
        self._undecided[name] = text

    def _decide(self, name: str, text: str) -> None:
        """Decides a request if all processes have answered it."""
        started = [int(number) for _, number in self._client.key_value_dir_get(f"{STARTED}{name}/")]
        if len(started) < jax.process_count():
            return
        if name == STOP:
            self._gate.stop_after(max(started), text)
        else:
            self._gate.pause_after(max(started) + 1, *json.loads(text), name=name)
        del self._undecided[name]
        if name != STOP and int(name) > 1 and jax.process_index() == 0:
            # Process 0 published this after it had decided the previous one; so had every process that answered.
            for key in (f"{ASKED}{int(name) - 1}", f"{STARTED}{int(name) - 1}"):
                self._client.key_value_delete(key)
