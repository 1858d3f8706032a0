"""The processes of one attempt on this machine: started under a guard, what they print relayed, sent signals.

Each leads a process group of its own, so a signal reaches all that it has started; the guard kills them where this
process cannot any more.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from .blame import Exit
from .logs import Log
from .output import TAIL_LINES, log_file, relay
from .terminal import Screen, Voice

GUARD = Path(__file__).parent / "guard.py"
"""The script that kills what this process leaves behind."""
READ_SECONDS = 2.0
"""How long to wait for the last lines of processes that are gone."""


class Start(NamedTuple):
    """One process to start on this machine.

    Attributes:
        command: What to run.
        environment: All of its environment.
        signals: What it gets in place of a signal.
        relay: Copies what it prints; called as `relay` is.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    signals: Mapping[signal.Signals, signal.Signals] = {}
    relay: Callable[..., None] = relay


@dataclass(kw_only=True, frozen=True)
class Worker:
    """A process under way, the leader of a process group of its own, and the threads that relay what it prints."""

    rank: int
    process: subprocess.Popen[bytes]
    out: deque[str]
    """The last lines of its stdout."""
    err: deque[str]
    """The last lines of its stderr."""
    log: Log
    threads: tuple[threading.Thread, ...]
    signals: Mapping[signal.Signals, signal.Signals]
    """What it gets in place of a signal."""
    voices: tuple[Voice, Voice]
    """What of its output the terminal gets."""


def start_worker(rank: int, start: Start, logs: Path, screen: Screen, guard: subprocess.Popen[bytes]) -> Worker:
    """Starts one process, puts it under the guard at once, and starts the relay of its output."""
    assert guard.stdin is not None
    log = Log(log_file(logs, rank), screen.say)
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
    out, err = deque(maxlen=TAIL_LINES), deque(maxlen=TAIL_LINES)
    voices = Voice(screen.out), Voice(screen.err)
    threads = tuple(
        threading.Thread(target=start.relay, args=(pipe, rank, log, tail, voice), daemon=True)
        for pipe, tail, voice in zip((process.stdout, process.stderr), (out, err), voices, strict=True)
    )
    for thread in threads:
        thread.start()
    return Worker(
        rank=rank,
        process=process,
        out=out,
        err=err,
        log=log,
        threads=threads,
        signals=start.signals,
        voices=voices,
    )


def watch(worker: Worker, events: SimpleQueue) -> None:
    """Puts the end of a process among the events as soon as it comes."""
    threading.Thread(target=lambda: events.put(Exit(worker.rank, worker.process.wait())), daemon=True).start()


def start_guard() -> subprocess.Popen[bytes]:
    """Starts the script that kills the processes if this one cannot."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(GUARD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
    )


def end_guard(guard: subprocess.Popen[bytes]) -> None:
    """Ends the guard before its pipe closes: there is nothing left to kill, and numbers are used again."""
    guard.kill()
    guard.wait()
    assert guard.stdin is not None
    guard.stdin.close()


def send(workers: Sequence[Worker], number: signal.Signals) -> None:
    """Sends a signal to the processes and all they have started."""
    for worker in workers:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.process.pid, worker.signals.get(number, number))


def halted_ranks(workers: Sequence[Worker]) -> list[int]:
    """The ranks whose process is stopped (SIGSTOP), where the system tells."""
    return [worker.rank for worker in workers if _state(worker.process.pid) == "T"]


def _state(pid: int) -> str:
    """The state of a process as Linux names it in one letter; "" where nobody knows."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def finish_reading(workers: Sequence[Worker], screen: Screen) -> None:
    """Lets the relays print the last lines, then closes the logs and the screen."""
    deadline = time.monotonic() + READ_SECONDS
    for worker in workers:
        for thread in worker.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in worker.threads):
            worker.log.close()
    screen.close(READ_SECONDS)
