"""Signals before there is anything to save: the command ends at once with a message and exit code 75.

Python runs signal handlers in the main thread, between two of its own instructions. While that thread is inside native
code (waiting for other processes, compiling, loading a library), no handler runs, perhaps for minutes. Here, a thread
receives every signal immediately. It ends the process, unless another handler is responsible: that of `gate` while a
run trains, or that of the launcher while it has processes. After `gate` has handled one signal, the second one ends the
process.

Only the command line uses this, not programs that call spmdkit as a library.
"""

import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
TRY_AGAIN = 75
"""A copy of the constant in mesh/exit_codes.py, which imports JAX and would delay signal handling."""
PRINT_SECONDS = 1.0
"""The time to print the message; the terminal may be blocked."""
SHOW_CURSOR = "\x1b[?25h"
_MARK = "_asks_once"
_answered: Counter[int] = Counter()
_ending = threading.Lock()


@contextmanager
def ends_on_signals(*, until_the_end: bool = False) -> Iterator[None]:
    """Ends the process on a signal that has no other handler, within a `with` block in the main thread.

    Args:
        until_the_end: The process ends after the block, so signals are handled until then.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    _answered.clear()
    previous_fd = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    before: dict[Any, Any] = {
        number: signal.signal(number, end_now)
        for number in SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup
    }
    thread = threading.Thread(target=_listen, args=(reading,), name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        if until_the_end:
            # While Python shuts down with default handlers, ignore another Ctrl-C.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        else:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_fd)
            os.close(writing)
            thread.join()
            os.close(reading)


def asks_once(handler: Callable[[int, Any], None]) -> Callable[[int, Any], None]:
    """Marks a handler that handles the first signal and restores the previous handler; it must call `answered`."""
    setattr(handler, _MARK, True)
    return handler


def answered(number: int) -> None:
    """Records that a handler marked by `asks_once` runs; call this before it restores the previous handler."""
    _answered[number] += 1


def end_now(number: int, frame: Any = None) -> None:
    """Ends the process at once, without saving."""
    _ending.acquire()  # a second caller waits for the end
    in_time = threading.Timer(PRINT_SECONDS, os._exit, [TRY_AGAIN])
    in_time.daemon = True
    in_time.start()
    with suppress(OSError, ValueError, RuntimeError):
        if sys.stdout.isatty():
            sys.stdout.write(SHOW_CURSOR)
        sys.stdout.flush()
        name = signal.Signals(number).name
        print(f"ended by {name}; the same command resumes from the latest checkpoint, if there is one", file=sys.stderr)
        sys.stderr.flush()
    os._exit(TRY_AGAIN)


def _listen(reading: int) -> None:
    """Reads the numbers of signals until the pipe closes."""
    seen: Counter[int] = Counter()
    while numbers := os.read(reading, 64):
        for number in numbers:
            if number in SIGNALS and _should_end(number, seen):
                end_now(number)


def _should_end(number: int, seen: Counter[int]) -> bool:
    """Returns whether a signal ends the process.

    A handler marked by `asks_once` may have run, and restored the previous one, before this thread sees its signal.

    Args:
        number: The number of the signal.
        seen: The signals that such handlers were responsible for; updated here.
    """
    handler = signal.getsignal(number)
    if handler is end_now and seen[number] >= _answered[number]:
        return True
    if handler is end_now or getattr(handler, _MARK, False):
        seen[number] += 1
    return seen[number] > _answered[number] + 1


def _reset_in_child() -> None:
    """Restores the default handlers: a forked process would write its signals into the pipe of its parent."""
    if any(signal.getsignal(number) is end_now for number in SIGNALS):
        signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        if signal.getsignal(number) is end_now:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


os.register_at_fork(after_in_child=_reset_in_child)
