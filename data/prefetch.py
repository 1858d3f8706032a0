"""A background thread that makes the next items of an iterator while the current one is in use."""

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

T = TypeVar("T")
JOIN_SECONDS = 10.0
_END = object()


class _Made(NamedTuple):
    """What the thread hands over: an item, or how it ended."""

    item: object = None
    error: BaseException | None = None
    last: bool = False


def run_ahead(
    items: Generator[T, None, None], depth: int, took: Callable[[float], None] | None = None
) -> Generator[T, None, None]:
    """The same items, up to `depth` of them made ahead of time by one background thread.

    Args:
        items: What to run; it is closed in the end, by the thread that ran it.
        depth: Items kept ready besides the one in use; 0 makes each on demand, without a thread.
        took: Gets the seconds that each item took to make, in the thread; not called where there is none.

    Returns:
        A generator. An error in `items` is raised where its item would have come. Closing the generator stops the
        thread, after the item it is at.
    """
    if depth == 0:
        with closing(items):
            yield from items
        return
    ready: SimpleQueue[_Made] = SimpleQueue()
    slots: SimpleQueue[bool] = SimpleQueue()  # True: make one more; False: stop (queues written in C: 3 us a step)
    for _ in range(depth):
        slots.put(True)
    stopped = threading.Event()
    finalizing = sys.is_finalizing  # a local name is still there when a generator is closed as Python exits
    arguments = (_timed(items, took) if took else items, ready, slots, stopped)
    thread = threading.Thread(target=_make, args=arguments, name="spmdkit-prefetch", daemon=True)
    thread.start()
    try:
        while not (made := ready.get()).last:
            slots.put(True)
            yield made.item  # pyright: ignore[reportReturnType]
        if made.error is not None:
            raise made.error
    finally:
        stopped.set()
        slots.put(False)
        if not finalizing():
            thread.join(JOIN_SECONDS)


def _make(
    items: Generator[T, None, None],
    ready: SimpleQueue[_Made],
    slots: SimpleQueue[bool],
    stopped: threading.Event,
) -> None:
    """The thread: one item for each free slot, until there are no more or nobody wants them."""
    try:
        with closing(items):
            while slots.get() and not stopped.is_set():
                made = next(items, _END)
                if made is _END:
                    break
                ready.put(_Made(made))
        ready.put(_Made(last=True))
    except BaseException as error:  # handed to whoever waits for the item
        ready.put(_Made(error=error, last=True))


def _timed(items: Generator[T, None, None], took: Callable[[float], None]) -> Generator[T, None, None]:
    """The same items; how long each took is told, without the time in which nobody asked for it."""
    with closing(items):
        began = time.perf_counter()
        for item in items:
            took(time.perf_counter() - began)
            yield item
            began = time.perf_counter()
