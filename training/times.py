"""The time split of a process: one activity at a time, each with a name."""

import os
import time
from contextlib import suppress
from pathlib import Path


class Times:
    """Seconds by kind of one thread. A switch to another kind costs half a microsecond."""

    def __init__(self, kind: str, since: float | None = None) -> None:
        """Starts the clock.

        Args:
            kind: The current activity.
            since: Its start in `time.monotonic` seconds; None means now.
        """
        self._kind = kind
        self._since = time.monotonic() if since is None else since
        self._seconds: dict[str, float] = {}

    def switch(self, kind: str) -> None:
        """Starts another activity."""
        now = time.monotonic()
        self._seconds[self._kind] = self._seconds.get(self._kind, 0.0) + now - self._since
        self._kind, self._since = kind, now

    def take(self) -> dict[str, float]:
        """Returns the seconds by kind since the last call."""
        self.switch(self._kind)
        taken, self._seconds = self._seconds, {}
        return taken


def process_age() -> float:
    """Returns the seconds since the start of this process; 0 if the system does not report it."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return 0.0
