"""Finds stragglers: processes that are slower than the others, in a run where all finish every step together.

Every process takes as long for a step as the slowest one, because its devices wait for the others in collectives. The
difference is in the hosts: fast hosts wait for their devices, and the slow one does not, because its devices are done
when it gets to them. So each process measures its own work,

    own work of a step = its time - waiting for devices = waiting for data + Python (batches, logging, dispatch)

and publishes the medians over the last steps with the watchdog's note: no collective, and only a few clock readings per
step. A single slow step does not change a median.

A process is a straggler if its own work exceeds that of the others by more than a share of the step, and it hardly
waits for its devices. Of two readers with nearly the same speed, the run only waits for the slower one: it is named.

A device that computes slowly is not detected here: its host waits for it like all others.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple, TypeVar

from ...mesh.processes import ranks

MIN_SECONDS = 0.002
"""The smallest delay of a step that counts."""

Item = TypeVar("Item")


class Work(NamedTuple):
    """The time of a step in one process: medians over its last steps, in seconds.

    Attributes:
        steps: The number of steps.
        step: From one step to the next.
        data: The part spent waiting for a batch.
        wait: The part spent waiting for devices.
    """

    steps: int
    step: float
    data: float
    wait: float

    @property
    def own(self) -> float:
        """The work of this process."""
        return max(0.0, self.step - self.wait)


class OwnWork:
    """Measures the steps of this process."""

    def __init__(self, steps: int) -> None:
        """Prepares the measurement.

        Args:
            steps: The number of steps for the medians.
        """
        self._found: deque[tuple[float, float, float]] = deque(maxlen=steps)
        self._waited = 0.0

    def waited(self, seconds: float) -> None:
        """Adds the time that the host waited for its devices."""
        self._waited += seconds

    def calls(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a step: the time that its call waits for devices does not count as work of this host.

        A backend may run a program within the call, or wait there for the previous one; only the CPU time of the call
        is this host's own.
        """

        def call(*arguments: Any) -> Any:
            clock, processor = time.perf_counter(), time.thread_time()
            result = step(*arguments)
            self._waited += max(0.0, (time.perf_counter() - clock) - (time.thread_time() - processor))
            return result

        return call

    def batches(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Wraps the batches: a step lasts from one request to the next."""
        begin = time.perf_counter()
        for batch in batches:
            came = time.perf_counter()
            self._waited = 0.0
            yield batch
            end = time.perf_counter()
            self._found.append((end - begin, came - begin, self._waited))
            begin = end

    def __call__(self) -> Work | None:
        """Returns the medians; None before there are enough steps. Any thread may call this."""
        found = list(self._found)
        if len(found) < (self._found.maxlen or 1):
            return None
        step, data, wait = (median(column) for column in zip(*found, strict=True))
        return Work(len(found), step, data, wait)


class Stragglers:
    """Reports once if a process becomes slow, and once if it no longer is."""

    def __init__(self, share: float, say: Callable[[str], None]) -> None:
        """Prepares the search.

        Args:
            share: The share of a step by which one process may delay the others.
            say: Prints a line.
        """
        self._share = share
        self._say = say
        self._slow: set[int] = set()

    def compare(self, works: Sequence[Work | None]) -> None:
        """Compares all processes.

        Args:
            works: The work by rank; None if a rank has not published any.
        """
        present = [work for work in works if work is not None]
        if len(present) < len(works):
            return
        slow = set(slow_ranks(present, self._share))
        for rank in sorted(slow - self._slow):
            self._say(f"warning: {describe_straggler(rank, present)}")
        if self._slow - slow:
            again = sorted(self._slow - slow)
            self._say(f"{ranks(again).capitalize()} no longer delay{'s' if len(again) == 1 else ''} the others.")
        self._slow = slow


def slow_ranks(works: Sequence[Work], share: float) -> list[int]:
    """Returns the ranks that delay every step by their own work.

    Args:
        works: The work by rank, of at least two.
        share: The share of a step above which a delay counts.
    """
    own = [work.own for work in works]
    found = []
    for rank, work in enumerate(works):
        excess = work.own - _elsewhere(own, rank)
        if excess > max(MIN_SECONDS, share * work.step) and work.wait < max(share * work.step, excess / 2):
            found.append(rank)
    return found


def describe_straggler(rank: int, works: Sequence[Work]) -> str:
    """Returns a sentence about one slow rank, with figures."""
    work = works[rank]
    own, data = (_elsewhere(values, rank) for values in ([each.own for each in works], [each.data for each in works]))
    return (
        f"rank {rank} delays every step: of the {_ms(work.step)} of a step its own work takes {_ms(work.own)}, "
        f"{_ms(own)} elsewhere (waiting for data {_ms(work.data)}, {_ms(data)} elsewhere; medians of {work.steps} "
        "steps)."
    )


def _elsewhere(values: Sequence[float], rank: int) -> float:
    return median(value for each, value in enumerate(values) if each != rank)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
