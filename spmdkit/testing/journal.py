"""What happened when in a run under faults: one JSON line each, appended by every process and by the launcher.

Times are seconds of `time.monotonic`, which all processes of a machine share.

    fault      a fault is about to be injected: index, kind, rank, step, phase
    attempt    the launcher starts the processes
    training   a process is about to start the first step of an attempt: rank, step
    ended      all processes of an attempt have ended: exits (rank, code, told to), cause, code
"""

import json
import os
import time
from pathlib import Path
from typing import Any


class Journal:
    """A file of events; None writes nothing."""

    def __init__(self, path: Path | None) -> None:
        """Opens a journal, which need not exist."""
        self._path = path

    def note(self, event: str, **values: Any) -> None:
        """Appends one event, in one write, before anything else happens."""
        if self._path is None:
            return
        line = json.dumps({"event": event, "time": time.monotonic(), **values}) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def events(self, event: str = "") -> list[dict[str, Any]]:
        """The events so far, all or those of one name, in the order they were noted."""
        if self._path is None or not self._path.exists():
            return []
        found = [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]
        return [each for each in found if event in ("", each["event"])]
