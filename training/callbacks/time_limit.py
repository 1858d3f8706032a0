"""Ends the run, saved, when it has taken so long."""

import re
import time
from dataclasses import dataclass

from ...mesh.errors import UserError
from ..times import process_age
from .callback import Callback
from .run import Run

UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)\s*")


@dataclass(kw_only=True)
class TimeLimit(Callback):
    """Saves and ends when the command has run for so long; the same command goes on.

    The time counts from the start of this command's process, compilation and restoring among it. It ends with the step
    that is under way, and the save: set it that much shorter.
    """

    after: str
    """How long: "3h", "90m", "2h 30m", "45s"."""
    try_again: bool = False
    """End with exit code 75, on which a supervisor or a scheduler starts the run again, for as long; not with 0."""

    def __post_init__(self) -> None:
        self._seconds = seconds_of(self.after)
        self._end = time.monotonic() - process_age() + self._seconds

    def on_step_begin(self, run: Run) -> None:
        """Looks at the clock."""
        if time.monotonic() > self._end:
            run.interrupt(f"the time limit of {self.after}", try_again=self.try_again)
            self._end = float("inf")


def seconds_of(text: str) -> float:
    """Seconds of a time such as "2h 30m".

    Raises:
        UserError: It is none, or nothing.
    """
    if not _PART.sub("", text).strip() and text.strip():
        seconds = sum(float(number) * UNITS[unit] for number, unit in _PART.findall(text))
        if seconds > 0:
            return seconds
    raise UserError(f"after={text!r} is no time: write '3h', '90m', '2h 30m' or '45s'.")
