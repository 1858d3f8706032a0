"""Whether a run that ended badly starts again, and when: while it makes progress, at once; else later and later.

Progress is a newer checkpoint. A run whose processes die again and again before the next one would do so for ever: it
may start again only so many times in a row without one.
"""

from pathlib import Path
from typing import NamedTuple

from ...training.ending.exits import TRY_AGAIN
from .processes import Outcome

LONGEST_WAIT = 60.0


class Restart(NamedTuple):
    """What comes after an attempt.

    Attributes:
        again: whether another follows.
        seconds: how long to wait before.
        reason: a line for people; "" where there is nothing to say.
    """

    again: bool
    seconds: float = 0.0
    reason: str = ""


class Restarts:
    """Counts the attempts of one run."""

    def __init__(self, checkpoints: Path, most: int) -> None:
        """Begins to count.

        Args:
            checkpoints: The run's folder of checkpoints.
            most: Restarts in a row without a newer checkpoint; 0 = never start again.
        """
        self._checkpoints = checkpoints
        self._most = most
        self._newest = newest_step(checkpoints)
        self._in_vain = 0

    def after(self, outcome: Outcome) -> Restart:
        """Decides what follows an attempt.

        Args:
            outcome: How it ended; only what may end otherwise another time (code 75) is tried again, and what a signal
                to the launcher has stopped is not.
        """
        if self._most == 0 or outcome.exit_code != TRY_AGAIN or outcome.signal is not None:
            return Restart(again=False)
        newest = newest_step(self._checkpoints)
        self._in_vain = 0 if newest > self._newest else self._in_vain + 1
        self._newest = newest  # which is less where a damaged checkpoint was set aside
        place = f"from step {newest}" if newest else "from the beginning"
        if self._in_vain > self._most:
            return Restart(again=False, reason=f"not started again: {self._most} restarts made no newer checkpoint")
        seconds = min(2.0 ** (self._in_vain - 1), LONGEST_WAIT) if self._in_vain else 0.0
        later = f" in {seconds:.0f} s" if seconds else ""
        count = f", restart {self._in_vain} of {self._most} without a newer checkpoint" if self._in_vain else ""
        return Restart(again=True, seconds=seconds, reason=f"starting again{later} {place}{count}")


def newest_step(checkpoints: Path) -> int:
    """The newest step that has a checkpoint; 0 where there is none."""
    names = [each.name for each in checkpoints.iterdir()] if checkpoints.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=0)
