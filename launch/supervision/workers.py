"""Runs the processes of one attempt: starts all, stops all if one fails, and returns how each ended.

JAX detects the death of a process only after its heartbeat timeout, does not detect a hang, and then aborts every other
process. Here, a process that fails is detected at once, and the others, which can only wait for it, are stopped within
seconds. Each process leads its own process group, so that a signal reaches everything that it has started.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

from ...mesh.exit_codes import DIVERGED, FINISHED, INVALID_INPUT
from .blame import Exit, Outcome, was_killed
from .output import MAX_TAIL_LINES, Log, MutableWriter, log_file, relay
from .process_state import read_state

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""The signals that end the launcher; they are passed on to the workers."""
SELF_EXPLANATORY = (INVALID_INPUT, DIVERGED)
"""Exit codes that do not need to wait for the exits of other processes."""
GRACE_SECONDS = 3.0
"""The time between SIGTERM and SIGKILL for the others if one has failed."""
SETTLE_SECONDS = 1.0
"""The time to wait, after an exit that may be a symptom, for one that explains it."""
LEAVE_SECONDS = 60.0
"""The maximum time between the end of a process that finished and those of the others."""
KILL_SECONDS = 10.0
"""The time to wait for the end of killed processes; only a broken disk or driver takes longer."""
READ_SECONDS = 2.0
"""The time to wait for the last output of processes that have ended."""
GUARD = """
import os, signal, sys
for group in [int(line) for line in sys.stdin]:
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        continue
"""
"""Kills the workers if the launcher dies, for any reason, even kill -9: then the pipe at its stdin closes.

It also kills hung and stopped workers and their children, which the kernel's parent-death signal does not reach.
"""


class Start(NamedTuple):
    """A process to start on this machine.

    Attributes:
        command: The command line.
        environment: The whole environment.
        signals: Signals that are replaced by others when they are passed on.
        relay: Copies the output; has the arguments of `output.relay`.
        is_rank: If this process is the rank itself, so that its state is that of the rank.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    signals: Mapping[signal.Signals, signal.Signals] = {}
    relay: Callable[..., None] = relay
    is_rank: bool = True


class Worker(NamedTuple):
    """A running process, its last lines, and the threads that copy its output."""

    rank: int
    process: subprocess.Popen[bytes]
    out: deque[str]
    err: deque[str]
    log: Log
    threads: tuple[threading.Thread, ...]
    signals: Mapping[signal.Signals, signal.Signals]
    writers: tuple[MutableWriter, MutableWriter]
    is_rank: bool


class Stage(IntEnum):
    """The stages of the end of a run."""

    RUNNING = 0
    LEAVING = 1
    """One process has finished; the others should do so now."""
    SETTLING = 2
    """One failed, perhaps because of another, whose exit may come next."""
    ASKED = 3
    """All were asked to end."""
    KILLED = 4
    GIVEN_UP = 5


def run_processes(starts: Sequence[Start], logs: Path, *, stop: float = GRACE_SECONDS) -> Outcome:
    """Runs several processes until all have ended. Call this in the main thread.

    If one fails, the others get SIGTERM, and SIGKILL GRACE_SECONDS later. The same happens if one has finished and the
    others have not LEAVE_SECONDS later. If this process gets SIGINT, SIGTERM, SIGHUP or SIGUSR1, all get that signal
    and `stop` seconds to save; then, or after a second signal, they are killed. No process outlives this one.

    Args:
        starts: The processes by rank.
        logs: The directory of the logs, created if it is missing.
        stop: Seconds before processes are killed because of a signal.

    Returns:
        The ends of all of them.
    """
    logs.mkdir(parents=True, exist_ok=True)
    events: SimpleQueue[Exit | signal.Signals] = SimpleQueue()
    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup
    handlers = {number: signal.signal(number, lambda got, _: events.put(signal.Signals(got))) for number in handled}
    workers: list[Worker] = []
    with start_guard() as guard:
        try:
            for rank, start in enumerate(starts):
                workers.append(start_worker(rank, start, logs, guard))
                watch(workers[-1], events)
            exits, received, states = _supervise(workers, events, stop)
        finally:
            send(workers, signal.SIGKILL)  # also to children that workers left behind
            guard.kill()  # before its pipe closes: the system may reuse the process ids
            finish_reading(workers)
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return Outcome(tuple(exits), received, tuple(list(each.err or each.out) for each in workers), states)


def _supervise(
    workers: Sequence[Worker], events: SimpleQueue, stop: float
) -> tuple[list[Exit], signal.Signals | None, dict[int, str]]:
    """Waits until all processes have ended, on their own or because one failed or a signal came."""
    exits: list[Exit] = []
    states: dict[int, str] = {}
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
        if wanted <= stage:
            continue
        if stage < Stage.SETTLING:
            states = read_states(workers)
        stage = wanted
        if stage is Stage.ASKED:
            if received is None and any(end.code != FINISHED for end in exits):
                _mute(workers, {end.rank for end in exits})
            send(workers, received or signal.SIGTERM)
        elif stage is Stage.KILLED:
            send(workers, signal.SIGKILL)
        seconds = {
            Stage.LEAVING: LEAVE_SECONDS,
            Stage.SETTLING: SETTLE_SECONDS,
            Stage.ASKED: stop if received else GRACE_SECONDS,
            Stage.KILLED: KILL_SECONDS,
        }
        deadline = time.monotonic() + seconds.get(stage, 0.0)
    return exits, received, states


def _stage_after(code: int, stage: Stage) -> Stage:
    """Returns the stage that the end of a process leads to."""
    if stage >= Stage.ASKED:
        return stage
    if code == FINISHED:
        return Stage.LEAVING
    return Stage.ASKED if was_killed(code) or code in SELF_EXPLANATORY else Stage.SETTLING


def _mute(workers: Sequence[Worker], ended: Collection[int]) -> None:
    """Mutes processes that are stopped because another failed: their output would bury its error."""
    for worker in workers:
        for writer in worker.writers:
            writer.is_muted = worker.rank not in ended


def _next_event(events: SimpleQueue, deadline: float | None) -> Exit | signal.Signals | None:
    """Returns the next event, or None after the deadline."""
    with suppress(Empty):
        return events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
    return None


def start_worker(rank: int, start: Start, logs: Path, guard: subprocess.Popen[bytes]) -> Worker:
    """Starts a process, reports it to the guard at once, and starts copying its output."""
    assert guard.stdin is not None
    log = Log(log_file(logs, rank))
    process = subprocess.Popen(
        start.command,
        env=start.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
    )
    guard.stdin.write(f"{process.pid}\n".encode())
    log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} process {process.pid}: {' '.join(start.command)}\n".encode())
    out, err = deque(maxlen=MAX_TAIL_LINES), deque(maxlen=MAX_TAIL_LINES)
    writers = MutableWriter(sys.stdout), MutableWriter(sys.stderr, is_stderr=True)
    threads = tuple(
        threading.Thread(target=start.relay, args=(pipe, rank, log, tail, writer), daemon=True)
        for pipe, tail, writer in zip((process.stdout, process.stderr), (out, err), writers, strict=True)
    )
    for thread in threads:
        thread.start()
    return Worker(rank, process, out, err, log, threads, start.signals, writers, start.is_rank)


def watch(worker: Worker, events: SimpleQueue) -> None:
    """Adds the end of a process to the events as soon as it ends."""
    threading.Thread(target=lambda: events.put(Exit(worker.rank, worker.process.wait())), daemon=True).start()


def start_guard() -> subprocess.Popen[bytes]:
    """Starts the GUARD script in its own session; write the process group of each worker to its stdin."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", GUARD],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
    )


def send(workers: Sequence[Worker], number: signal.Signals) -> None:
    """Sends a signal to the processes and everything that they have started."""
    for worker in workers:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.process.pid, worker.signals.get(number, number))


def read_states(workers: Sequence[Worker]) -> dict[int, str]:
    """Returns the state of each rank that has not ended; on Linux only."""
    states = {worker.rank: read_state(worker.process.pid) for worker in workers if worker.is_rank}
    return {rank: state for rank, state in states.items() if state}


def finish_reading(workers: Sequence[Worker]) -> None:
    """Waits for the last output, then closes the logs."""
    deadline = time.monotonic() + READ_SECONDS
    for worker in workers:
        for thread in worker.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in worker.threads):
            worker.log.close()


def free_port() -> int:
    """Finds a port on which nothing on this machine listens, on IPv4 and IPv6.

    Use a new one for every attempt of a run. JAX's coordinator binds with SO_REUSEPORT: two runs that share a port do
    not fail but abort each other. Therefore, this function binds the port exclusively, and closes it again.
    """
    try:
        probe = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):  # a machine without IPv6
        probe = socket.create_server(("", 0))
    with probe:
        return probe.getsockname()[1]
