"""Which process is slower than the others, in a run where all of them finish every step together.

Every process takes as long for a step as the slowest, because its devices wait for the others' in collectives. What
differs is what a host does meanwhile: those that are quick wait for their devices, the slow one does not, since its
devices are done when it comes to look. So each measures its own work,

    own work of a step = its time - waiting for devices = waiting for data + Python (batches, logging, dispatch)

and tells the others the medians over the last steps, with the watchdog's note: no collective, and nothing on the way of
a step but a few readings of the clock. A single slow step moves no median.

A process is slow where its own work is longer by more than a share of the step than what the others could keep up with,
and it hardly waits for its devices. The others keep up with their own work, and with how long their batches take in the
background: of two readers that are nearly as quick, only the slower one is ever waited for, by the little that it is.

A device that computes slowly is not seen here: its host waits for it like all others.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple, TypeVar

from ...mesh.coordination import ranks

LEAST_SECONDS = 0.002
"""Of a step; what holds up for less is nobody's concern."""

Item = TypeVar("Item")


class Work(NamedTuple):
    """What a step takes in one process, medians over its last steps, in seconds.

    Attributes:
        steps: how many steps it is the median of.
        step: from one step to the next.
        data: of it, waiting for a batch.
        wait: of it, waiting for devices.
        read: making a batch in the background, whether anyone waits for it or not; 0 where nothing is read ahead.
    """

    steps: int
    step: float
    data: float
    wait: float
    read: float = 0.0

    @property
    def own(self) -> float:
        """What is this process's own."""
        return max(0.0, self.step - self.wait)

    @property
    def pace(self) -> float:
        """What the shortest step takes that this process could keep up with, were it alone."""
        return max(self.own, self.read)


class OwnWork:
    """Measures the steps of this process."""

    def __init__(self, steps: int) -> None:
        """Measures nothing yet.

        Args:
            steps: Over how many steps medians are taken.
        """
        self._found: deque[tuple[float, float, float]] = deque(maxlen=steps)
        self._read: deque[float] = deque(maxlen=steps)
        self._waited = 0.0

    def took(self, seconds: float) -> None:
        """Adds what a batch took in the background; the thread that made it may call this."""
        self._read.append(seconds)

    def waited(self, seconds: float) -> None:
        """Adds what the host has waited for its devices."""
        self._waited += seconds

    def calls(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The same step; where its call waits for devices, that is no work of this host.

        A backend may run a program within the call, or wait there for the one before; what the call takes of the
        processor is this host's own.
        """

        def call(*arguments: Any) -> Any:
            clock, processor = time.perf_counter(), time.thread_time()
            result = step(*arguments)
            waited = (time.perf_counter() - clock) - (time.thread_time() - processor)
            self._waited += max(0.0, waited)
            return result

        return call

    def batches(self, batches: Iterable[Item]) -> Iterator[Item]:
        """The same batches; from the request for one to the next is a step."""
        begin = time.perf_counter()
        for batch in batches:
            came = time.perf_counter()
            self._waited = 0.0
            yield batch
            end = time.perf_counter()
            self._found.append((end - begin, came - begin, self._waited))
            begin = end

    def __call__(self) -> Work | None:
        """The medians; None before there are steps enough. Any thread may ask."""
        found = list(self._found)
        if len(found) < (self._found.maxlen or 1):
            return None
        step, data, wait = (median(column) for column in zip(*found, strict=True))
        return Work(len(found), step, data, wait, median(list(self._read) or [0.0]))


class Stragglers:
    """Says once when a process becomes slow, and once when it no longer is."""

    def __init__(self, share: float, say: Callable[[str], None]) -> None:
        """Knows of none yet.

        Args:
            share: Of a step, that the own work of one process may hold up.
            say: Gets a line.
        """
        self._share = share
        self._say = say
        self._slow: set[int] = set()

    def look(self, works: Sequence[Work | None]) -> None:
        """Compares all processes.

        Args:
            works: By rank; None of one that has not told yet.
        """
        if any(work is None for work in works):
            return
        slow = set(slow_ranks(works, self._share))
        for rank in sorted(slow - self._slow):
            self._say(f"warning: {told(rank, works)}")
        if self._slow - slow:
            again = sorted(self._slow - slow)
            self._say(f"{ranks(again).capitalize()} no longer hold{'s' if len(again) == 1 else ''} the others up.")
        self._slow = slow


def slow_ranks(works: Sequence[Work | None], share: float) -> list[int]:
    """The ranks whose own work holds up every step.

    Args:
        works: By rank; None of one that has not told yet.
        share: Of a step, above which it counts.
    """
    present = [work for work in works if work is not None]
    if len(present) < max(2, len(works)):
        return []
    found = []
    for rank, work in enumerate(present):
        excess = work.own - _elsewhere([each.pace for each in present], rank)
        if excess > max(LEAST_SECONDS, share * work.step) and work.wait < max(share * work.step, excess / 2):
            found.append(rank)
    return found


def told(rank: int, works: Sequence[Work | None]) -> str:
    """One slow rank in a sentence, with figures."""
    present = [work for work in works if work is not None]
    work = present[rank]
    pace, own, data = (
        _elsewhere(values, rank) for values in zip(*((each.pace, each.own, each.data) for each in present), strict=True)
    )
    times = f", {work.own / pace:.1f} times what the others need" if pace > 0 else ""
    rest, others = work.own - work.data, own - data
    return (
        f"rank {rank} holds every step up: of the {_ms(work.step)} of a step its own work takes {_ms(work.own)}{times} "
        f"(waiting for data {_ms(work.data)}, {_ms(data)} elsewhere; Python {_ms(max(0.0, rest))}, "
        f"{_ms(max(0.0, others))} elsewhere; medians of {work.steps} steps)."
    )


def _elsewhere(values: Sequence[float], rank: int) -> float:
    return median(value for each, value in enumerate(values) if each != rank)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
