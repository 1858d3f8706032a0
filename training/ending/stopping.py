"""What is done between two steps, at the same step in every process: a stop that a signal asks for, a pause that a
callback asks for.

SIGTERM, SIGINT (Ctrl-C), SIGHUP and SIGUSR1 (a scheduler's warning) ask a run to end: it finishes the steps that it has
started, saves, and ends with a code that says "try again". A second signal of the kind ends it at once. Callbacks ask
for a pause: to evaluate, to save, to stop (see callbacks/asks.py).

Processes get a signal at different times, or only one of them does, and their hosts are a few steps apart. So:

    1. Whoever has something to ask says so to all, over the coordination service. Every process may pass on a signal;
       of callbacks only process 0 asks, one request after the other.
    2. A thread of each process, which no device can hold up, closes the gate that every step passes, and tells the
       others which step this process started last.
    3. When all have told, the last of these steps is where all of them stop, and the step after it is where all of them
       pause; whoever is behind goes on to it.

A host that waits for its devices, which wait for other hosts, is no obstacle: its thread answers, and those behind go
on.

A run that goes back to a checkpoint (`Gate.go_back`) takes none of that along: numbers of steps mean others from then
on. What callbacks asked for is dropped, and a stop that was asked for happens at once.
"""

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax

from ...mesh.compat import coordination_client
from ...mesh.coordination import PREFIX, exchange
from ...mesh.processes import tell
from .interrupts import SIGNALS, answered, asks_once

POLL_SECONDS = 0.25
DECIDING_SECONDS = 0.05
"""Between two looks while the gate is closed."""
FOLDER = f"{PREFIX}turns/"
ASKED, STARTED = f"{FOLDER}asked/", f"{FOLDER}started/"
STOP = "stop"
"""The name of what signals ask for; what callbacks ask for is numbered."""


class Gate:
    """What every step passes before it starts, and who decides where it closes."""

    def __init__(self) -> None:
        self.reason = ""
        self._started = 0
        self._last: int | None = None
        self._undecided: set[str] = set()
        self._pauses: dict[int, list[str]] = {}
        self._dropped = 0
        self._change = threading.Condition()
        self.on_ask: Callable[[str], None] = self._pause_alone
        self.last_request: Callable[[], int] = lambda: 0

    def passes(self, number: int) -> bool:
        """Tells whether a step may start; waits where that is not decided yet.

        Args:
            number: Of the step; steps come in order.
        """
        with self._change:
            while self._undecided:
                self._change.wait()
            if self._last is not None and number > self._last:
                return False
            self._started = number
            return True

    def close(self, name: str = STOP) -> int:
        """Lets no further step start before it is decided what comes after which; gives the last that was started.

        Args:
            name: What is to be decided.
        """
        with self._change:
            self._undecided.add(name)
            return self._started

    def stop_after(self, number: int, reason: str) -> None:
        """Decides which step is the last; of two decisions the earlier step counts.

        Args:
            number: At least what `close` gave; without that, the step that all processes are at.
            reason: For people.
        """
        with self._change:
            self._undecided.discard(STOP)
            if self._last is None or number < self._last:
                self._last, self.reason = number, reason
            self._change.notify_all()

    def pause_after(self, number: int, *texts: str, name: str = "") -> None:
        """Decides after which step to pause.

        Args:
            number: More than what `close` gave.
            texts: What is asked for, which `asked_at` gives then.
            name: As it was given to `close`.
        """
        with self._change:
            self._undecided.discard(name)
            if not (name.isdigit() and int(name) <= self._dropped):
                self._pauses.setdefault(number, []).extend(texts)
            self._change.notify_all()

    def ask(self, text: str) -> None:
        """Asks for a pause, as soon as can be; returns at once. Of several processes, process 0 asks alone.

        Args:
            text: What for.
        """
        self.on_ask(text)

    def asked_at(self, number: int) -> list[str]:
        """What all processes pause for after a step that has passed; nothing where they do not."""
        return self._pauses.get(number, [])  # of a step that has passed, all is decided

    def go_back(self, number: int, name: str, seconds: float) -> None:
        """Goes on from an earlier step, with nothing of the steps after it. All processes call this; none trains.

        A stop that any of them was asked for is decided here: the step that they are at is the last.

        Args:
            number: Of that step, the same in all.
            name: What they exchange; used once.
            seconds: How long to wait for the other processes.

        Raises:
            ProcessesMissing: Some did not come in time.
        """
        last_request = self.last_request()
        with self._change:
            self._started = number  # whoever is asked from now on tells this one
            told = json.dumps([self.is_closing, self.reason, last_request])
        texts = [json.loads(each) for each in exchange(name, told, seconds=seconds)]
        with self._change:
            self._pauses.clear()
            self._dropped = texts[0][2]  # of process 0; others may decide these later than this one
        if any(is_closing for is_closing, _, _ in texts):
            self.stop_after(number, next((reason for _, reason, _ in texts if reason), "a signal"))

    @property
    def is_closing(self) -> bool:
        """Whether a step will be the last one, known or not."""
        return STOP in self._undecided or self._last is not None

    def _pause_alone(self, text: str) -> None:
        self.pause_after(self.close("alone") + 1, text, name="alone")


@contextmanager
def stops_on_signals() -> Iterator[Gate]:
    """Listens to signals for a `with` block that begins when the processes of the run have joined.

    Outside the main thread, which alone gets signals, it listens to the other processes only.
    """
    gate = Gate()
    listener = _Alone(gate) if coordination_client() is None else _Together(gate)
    before: dict[Any, Any] = {}

    @asks_once
    def handle(number: int, frame: Any) -> None:
        answered(number)
        signal.signal(number, before[number])  # the next one is not ours
        listener.ask(signal.Signals(number).name)

    for number in SIGNALS if threading.current_thread() is threading.main_thread() else ():
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
    """A run of several: a thread that hears of all that is asked, and decides with the others."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._client: Any = coordination_client()
        self._signal = ""
        self._pauses: list[str] = []
        self._number = 0
        self._saying = threading.Lock()
        self._undecided: dict[str, str] = {}
        self._seen: set[str] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="stop-with-the-others", daemon=True)
        gate.on_ask, gate.last_request = self._pauses.append, self._forget

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._end.set()
        self._thread.join()

    def ask(self, reason: str) -> None:
        self._signal = f"{reason} to rank {jax.process_index()}"

    def _listen(self) -> None:
        while not self._end.wait(DECIDING_SECONDS if self._undecided else POLL_SECONDS):
            with suppress(Exception):  # the service ends with process 0; then there is nobody to stop with
                self._look()

    def _look(self) -> None:
        """Says what is to be said; decides what all have answered; answers what is newly asked, in this order."""
        with self._saying:
            self._say()
        asked = {key.removeprefix(ASKED): text for key, text in self._client.key_value_dir_get(ASKED)}
        for name, text in list(self._undecided.items()):
            self._decide(name, text)
        for name in asked.keys() - self._seen:
            self._answer(name, asked[name])

    def _say(self) -> None:
        """Tells all what this process asks for."""
        if self._signal:
            self._client.key_value_set(f"{ASKED}{STOP}", self._signal, allow_overwrite=True)
            if STOP not in self._seen:  # the launcher reads this line, see supervision/blame.py
                tell(f"got {self._signal.partition(' ')[0]}: all processes of the run stop after the same step")
            self._signal = ""
        is_free = not self._number or (str(self._number) in self._seen and str(self._number) not in self._undecided)
        if self._pauses and is_free and jax.process_index() == 0:
            told = list(self._pauses)  # the training thread may be adding to it
            self._client.key_value_set(f"{ASKED}{self._number + 1}", json.dumps(told))
            self._number += 1
            del self._pauses[: len(told)]

    def _forget(self) -> int:
        """Drops what is not said yet; gives the number of the last request that is."""
        with self._saying:
            self._pauses.clear()
            return self._number

    def _answer(self, name: str, text: str) -> None:
        """Closes the gate for what is newly asked, and tells how far this process is.

        Several things may be asked at once, and heard of in any order: each is answered as soon as it is seen, so that
        nobody waits for an answer while it owes one.
        """
        started = self._gate.close(name)
        self._client.key_value_set(f"{STARTED}{name}/{jax.process_index()}", str(started), allow_overwrite=True)
        self._seen.add(name)
        self._undecided[name] = text

    def _decide(self, name: str, text: str) -> None:
        """Decides what all have answered."""
        started = [int(number) for _, number in self._client.key_value_dir_get(f"{STARTED}{name}/")]
        if len(started) < jax.process_count():
            return
        if name == STOP:
            self._gate.stop_after(max(started), text)
        else:
            self._gate.pause_after(max(started) + 1, *json.loads(text), name=name)
        del self._undecided[name]
        if name != STOP and int(name) > 1 and jax.process_index() == 0:
            # Process 0 asked when it had decided the request before; whoever has answered has decided that too.
            for key in (f"{ASKED}{int(name) - 1}", f"{STARTED}{int(name) - 1}"):
                self._client.key_value_delete(key)
