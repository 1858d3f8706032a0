"""A line now and then while something takes long, on stderr."""

import sys
import time

from ...layouts.sizes import format_bytes
from ...mesh.text import printable

EVERY_SECONDS = 5.0


class Progress:
    """Counts bytes of a known number; says nothing in the first seconds."""

    def __init__(self, what: str, total: int) -> None:
        """Begins to count.

        Args:
            what: What is done, such as "step 40".
            total: Bytes in all.
        """
        self._what, self._total, self._done = what, total, 0
        self._told = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Counts bytes that are done."""
        self._done += num_bytes
        now = time.monotonic()
        if now - self._told >= EVERY_SECONDS:
            self._told = now
            done, total = format_bytes(self._done), format_bytes(self._total)
            print(printable(f"{self._what}: {done} of {total}"), file=sys.stderr, flush=True)
