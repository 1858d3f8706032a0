"""Where the time of a process goes: one thing at a time, each with a name."""

import time
from contextlib import suppress
from pathlib import Path


class Times:
    """Seconds by kind of one thread; to go over to another kind costs half a microsecond."""

    def __init__(self, kind: str, since: float | None = None) -> None:
        """Begins to count.

        Args:
            kind: What is being done.
            since: Since when, in `time.monotonic` seconds; None = now.
        """
        self._kind = kind
        self._since = time.monotonic() if since is None else since
        self._seconds: dict[str, float] = {}

    def switch(self, kind: str) -> None:
        """Notes what is done from now on."""
        now = time.monotonic()
        self._seconds[self._kind] = self._seconds.get(self._kind, 0.0) + now - self._since
        self._kind, self._since = kind, now

    def take(self) -> dict[str, float]:
        """Gives the seconds by kind since the last call, up to now."""
        self.switch(self._kind)
        taken, self._seconds = self._seconds, {}
        return taken


def process_age() -> float:
    """How long this process has been there, in seconds; 0 where the system does not tell."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        import os

        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return 0.0
