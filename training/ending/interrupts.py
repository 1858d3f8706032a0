"""Signals that come when nothing is there to be saved: the command ends at once, with a word, and code 75.

Python runs its handlers in the main thread, between two of its own instructions. While that thread is inside native
code (it waits for other processes to join, compiles, loads a library) no handler runs, for minutes. Here a thread of
its own hears of every signal as it comes. It ends the process, unless something else has taken the signal over:
`stopping.py` while a run is under way, the launcher while it has processes. Where `stopping.py` has been asked once,
the second signal ends the process too.

Not for programs that call spmdkit as a library: it is the command line that begins to listen.
"""

import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
TRY_AGAIN = 75
"""As in exits.py, which cannot be imported as early as this file."""
LAST_WORDS_SECONDS = 1.0
"""For the last words, where the terminal takes none."""
SHOW_CURSOR = "\x1b[?25h"
_ASKS = "_asks_once"
_answered: Counter[int] = Counter()
_ending = threading.Lock()


@contextmanager
def ends_on_signals(*, until_the_end: bool = False) -> Iterator[None]:
    """Ends the process on a signal that nothing else takes, for a `with` block in the main thread.

    Args:
        until_the_end: The process ends after the block: signals that come while it does are no others.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "set_wakeup_fd"):
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    _answered.clear()
    before_it = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
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
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python ends with its default: another Ctrl-C hits nothing
        else:
            _restore(before, before_it, reading, writing, thread)


def _restore(before: dict[Any, Any], before_it: int, reading: int, writing: int, thread: threading.Thread) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.set_wakeup_fd(before_it)
    os.close(writing)
    thread.join()
    os.close(reading)


def asks_once(handler: Callable[[int, Any], None]) -> Callable[[int, Any], None]:
    """Marks a handler that answers the first signal and hands the next back; it calls `answered`."""
    setattr(handler, _ASKS, True)
    return handler


def answered(number: int) -> None:
    """Notes that a handler of `asks_once` runs, before it hands its signal back."""
    _answered[number] += 1


def end_now(number: int, frame: Any = None) -> None:
    """Ends the process at once; nothing is saved that is not on disk."""
    _ending.acquire()  # whoever comes second waits for the end
    in_time = threading.Timer(LAST_WORDS_SECONDS, os._exit, [TRY_AGAIN])
    in_time.daemon = True
    in_time.start()
    with suppress(OSError, ValueError, RuntimeError):
        if sys.stdout.isatty():
            sys.stdout.write(SHOW_CURSOR)
        sys.stdout.flush()
        name = signal.Signals(number).name
        print(f"ended by {name}; the same command goes on from the newest checkpoint, if there is one", file=sys.stderr)
        sys.stderr.flush()
    os._exit(TRY_AGAIN)


def _listen(reading: int) -> None:
    """Reads the number of each signal as it comes, until the pipe closes."""
    seen: Counter[int] = Counter()
    while numbers := os.read(reading, 64):
        for number in numbers:
            if number in SIGNALS and _ends(number, seen):
                end_now(number)


def _ends(number: int, seen: Counter[int]) -> bool:
    """Whether a signal ends the process.

    A handler that asks may have run before this thread hears of its signal, and have handed the next one back.

    Args:
        number: Of the signal.
        seen: How many of each number were such a handler's; counted here.
    """
    handler = signal.getsignal(number)
    if handler is end_now and seen[number] >= _answered[number]:
        return True
    if handler is end_now or getattr(handler, _ASKS, False):
        seen[number] += 1
    return seen[number] > _answered[number] + 1


def _in_a_child() -> None:
    """A forked process would write its signals into the pipe of its parent."""
    if any(signal.getsignal(number) is end_now for number in SIGNALS):
        signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        if signal.getsignal(number) is end_now:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_child)
