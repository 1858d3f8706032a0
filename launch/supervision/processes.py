"""Runs the processes of one attempt: starts all, stops all when one fails, tells which and why.

JAX notices the death of a process after its heartbeat timeout and a hang never, and then aborts every other process.
Here a process that ends badly is noticed at once, and the rest, which can only wait for it, are stopped within seconds.
Who is to blame is found in how all of them ended (see `blame`).
"""

import signal
import sys
import time
from collections.abc import Collection, Sequence
from enum import IntEnum
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from ...training.ending.exits import DIVERGED, FINISHED, TRY_AGAIN, USER_MISTAKE
from .blame import Cause, Exit, find_cause, was_killed
from .terminal import Screen
from .workers import Start, Worker, end_guard, finish_reading, halted_ranks, send, start_guard, start_worker, watch

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Those that end the launcher; the workers get the same one."""
CLEAR = (USER_MISTAKE, DIVERGED)
"""Codes that need no explanation by how others end."""
SETTLE_SECONDS = 1.0
"""How long to wait, after an exit that may be a symptom, for one that explains it."""
LEAVE_SECONDS = 60.0
"""How long the others may take once one has finished: processes leave a run together."""
KILL_SECONDS = 10.0
"""How long to wait for the end of processes that were killed; only a broken disk or driver makes it longer."""


class Outcome(NamedTuple):
    """The end of all processes.

    Attributes:
        exits: In the order they ended.
        signal: The signal that ended the launcher, or None.
        tails: The last lines of each rank: of its stderr, or of its stdout where that is empty.
        halted: Ranks that were found stopped (SIGSTOP) when the first ended.
    """

    exits: tuple[Exit, ...]
    signal: signal.Signals | None
    tails: tuple[list[str], ...]
    halted: tuple[int, ...] = ()

    @property
    def cause(self) -> Cause | None:
        """What ended the run; None where all is well, or the launcher itself was told to end."""
        return find_cause(self.exits, self.tails, self.halted, asked=self.signal is not None)

    @property
    def exit_code(self) -> int:
        """What the launcher exits with: the cause's code; 75 where the launcher was told to end."""
        cause = self.cause
        if cause is None:
            return FINISHED if self.signal is None else TRY_AGAIN
        return cause.exit_code


class Stage(IntEnum):
    """How far the end of a run has come."""

    RUNNING = 0
    LEAVING = 1
    """One has finished; the others do so at the same time, or never."""
    SETTLING = 2
    """One ended badly, maybe because of another, whose end may come next."""
    ASKED = 3
    """All were told to end."""
    KILLED = 4
    GIVEN_UP = 5


def run_processes(
    starts: Sequence[Start],
    logs: Path,
    *,
    grace: float = 3.0,
    stop: float = 3.0,
    leave: float = LEAVE_SECONDS,
) -> Outcome:
    """Runs several processes until all have ended. To be called in the main thread.

    When one ends badly, the others get SIGTERM, and what is left `grace` seconds later is killed: they can only wait
    for it. So it is where one has finished and the others have not `leave` seconds later. When this process gets
    SIGINT, SIGTERM, SIGHUP or SIGUSR1, all get that signal, and `stop` seconds to save; then, or on a second signal,
    what is left is killed. None outlives this process, however it ends.

    Args:
        starts: The processes by rank.
        logs: Folder for the output of each rank, made if it is missing.
        grace: Seconds between asking processes to end, because one has failed, and killing them.
        stop: The same, because of a signal.
        leave: Seconds between the end of one that has finished and that of the others.

    Returns:
        How all of them ended.
    """
    logs.mkdir(parents=True, exist_ok=True)
    events: SimpleQueue[Exit | signal.Signals] = SimpleQueue()
    screen = Screen.of(sys.stdout, sys.stderr)
    workers: list[Worker] = []
    handlers = _handle_signals(events)
    guard = start_guard()
    try:
        for rank, start in enumerate(starts):
            workers.append(start_worker(rank, start, logs, screen, guard))
            watch(workers[-1], events)
        exits, received, halted = _supervise(workers, events, _Patience(grace, stop, leave))
    finally:
        send(workers, signal.SIGKILL)  # what workers started and left behind, too
        end_guard(guard)
        finish_reading(workers, screen)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    tails = tuple(list(worker.err or worker.out) for worker in workers)
    return Outcome(tuple(exits), received, tails, tuple(halted))


class _Patience(NamedTuple):
    """Seconds to wait: see `run_processes`."""

    grace: float
    stop: float
    leave: float


def _supervise(
    workers: Sequence[Worker], events: SimpleQueue, patience: _Patience
) -> tuple[list[Exit], signal.Signals | None, list[int]]:
    """Waits until all processes have ended, by themselves or because one failed or a signal came."""
    exits: list[Exit] = []
    halted: list[int] = []
    received: signal.Signals | None = None
    stage, deadline = Stage.RUNNING, None
    while len(exits) < len(workers) and stage is not Stage.GIVEN_UP:
        event = _next_event(events, deadline)
        if isinstance(event, Exit):
            exits.append(event._replace(stopped=stage >= Stage.ASKED))
            wanted = _stage_after(event.code, stage)
        elif event is None:
            wanted = Stage(stage + 1)
        else:
            received = received or event
            wanted = Stage.KILLED if stage is Stage.ASKED else Stage.ASKED
        if wanted > stage:
            if stage < Stage.SETTLING:
                halted = halted_ranks(workers)
            stage = wanted
            if stage is Stage.ASKED and received is None and any(end.code != FINISHED for end in exits):
                _silence(workers, {end.rank for end in exits})
            deadline = _enter(stage, workers, received, patience)
    return exits, received, halted


def _stage_after(code: int, stage: Stage) -> Stage:
    """Returns what the end of a process calls for."""
    if stage >= Stage.ASKED:
        return stage
    if code == FINISHED:
        return Stage.LEAVING
    return Stage.ASKED if was_killed(code) or code in CLEAR else Stage.SETTLING


def _enter(stage: Stage, workers: Sequence[Worker], received: signal.Signals | None, patience: _Patience) -> float:
    """Does what a stage begins with; returns when it is over, in `time.monotonic` seconds."""
    if stage is Stage.ASKED:
        send(workers, received or signal.SIGTERM)
    elif stage is Stage.KILLED:
        send(workers, signal.SIGKILL)
    seconds = {
        Stage.LEAVING: patience.leave,
        Stage.SETTLING: SETTLE_SECONDS,
        Stage.ASKED: patience.stop if received else patience.grace,
        Stage.KILLED: KILL_SECONDS,
    }
    return time.monotonic() + seconds.get(stage, 0.0)


def _silence(workers: Sequence[Worker], ended: Collection[int]) -> None:
    """Shows no more of processes that are ended because another failed: it would bury what that one said."""
    for worker in workers:
        for voice in worker.voices:
            voice.is_silent = worker.rank not in ended


def _next_event(events: SimpleQueue, deadline: float | None) -> Exit | signal.Signals | None:
    """Returns the next event, or None when the deadline has passed."""
    try:
        return events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
    except Empty:
        return None


def _handle_signals(events: SimpleQueue) -> dict[signal.Signals, Any]:
    """Turns signals that end this process into events, but for those it ignores (nohup); returns the old handlers."""
    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, lambda got, _: events.put(signal.Signals(got))) for number in handled}
