"""The kernels and collectives of a simulated step as a trace that Perfetto and chrome://tracing open.

Format: "Trace Event Format", Google (Chromium, catapult). Times are in microseconds since the step began.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..mesh.files import absolute_path, write_text

COMPUTE, HOST, NETWORK = QUEUES = ("kernels", "collectives within hosts", "collectives between hosts")
MAX_EVENTS = 100_000
"""Events of a trace; later turns of a loop that would exceed it become one event."""


class Event(NamedTuple):
    """One kernel, one collective, or a time during which kernels wait for a collective.

    Attributes:
        queue: One of `QUEUES`.
        name: The instruction of the kernel, the kind of the collective, or "waits for ...".
        begin: Seconds since the step began.
        seconds: Its duration.
        source: The operation of JAX that it comes from.
    """

    queue: str
    name: str
    begin: float
    seconds: float
    source: str


class Recorder:
    """Collects the events of a simulation.

    Args:
        limit: The most events to keep; 0 keeps none.
    """

    def __init__(self, limit: int = 0) -> None:
        self.events: list[Event] = []
        self.limit = limit

    def add(self, event: Event) -> None:
        """Adds an event, unless the limit is reached."""
        if len(self.events) < self.limit and event.seconds > 0:
            self.events.append(event)

    def repeat(self, first: int, turns: int, period: float) -> None:
        """Repeats the events of one turn of a loop; turns beyond the limit become one event.

        Args:
            first: The position of the first event of the turn; it ends with the last event so far.
            turns: The number of repetitions.
            period: Seconds of one turn.
        """
        body = self.events[first:]
        if not body or turns < 1:
            return
        copied = min(turns, max(0, self.limit - len(self.events)) // len(body))
        for turn in range(1, copied + 1):
            self.events += [each._replace(begin=each.begin + turn * period) for each in body]
        if copied < turns:
            begin = body[0].begin + (copied + 1) * period
            rest = f"{turns - copied:,} more turns of this loop"
            self.events.append(Event(COMPUTE, rest, begin, (turns - copied) * period, body[0].source))

    def replace(self, first: int, chosen: Sequence[Event], begin: float, scale: float) -> None:
        """Replaces the events from a position by those of one branch, whose times are scaled.

        Args:
            first: The position.
            chosen: The events of the branch.
            begin: The time at which the branch begins.
            scale: The share of its time that counts.
        """
        self.events[first:] = [
            each._replace(begin=begin + (each.begin - begin) * scale, seconds=each.seconds * scale) for each in chosen
        ]


def write_trace(path: Path, events: Sequence[Event], title: str) -> None:
    """Writes a trace atomically.

    Args:
        path: The JSON file.
        events: The events of a step.
        title: The name of the simulated device.

    Raises:
        OSError: The file cannot be written.
    """
    names = [("process_name", 0, f"{title} (simulated, not measured)")]
    names += [("thread_name", number, queue) for number, queue in enumerate(QUEUES)]
    trace: list[dict[str, Any]] = [
        {"ph": "M", "name": kind, "pid": 0, "tid": number, "args": {"name": name}} for kind, number, name in names
    ]
    for each in events:
        times = {"ts": round(each.begin * 1e6, 3), "dur": round(each.seconds * 1e6, 3)}
        place = {"ph": "X", "pid": 0, "tid": QUEUES.index(each.queue)}
        trace.append({**place, "name": each.name, **times, "args": {"source": each.source}})
    write_text(absolute_path(path), json.dumps({"traceEvents": trace, "displayTimeUnit": "ms"}))
