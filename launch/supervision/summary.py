"""The last words of a launch: what failed first, and what that process said."""

import signal
from pathlib import Path

from ...training.exits import FINISHED
from .output import last_words, log_file
from .processes import Outcome


def summary(outcome: Outcome, logs: Path | None) -> list[str]:
    """Returns the last lines of a launch: none where all is well; else which rank failed, how, and what it said.

    Args:
        outcome: How the processes ended.
        logs: The folder of their output, where it is kept.
    """
    cause = outcome.cause
    if cause is None:
        return [] if outcome.signal is None else [f"stopped by {outcome.signal.name}; the same command goes on"]
    kept = f", all of them in {log_file(logs, cause.rank)}" if logs else ""
    lines = [f"rank {cause.rank} failed first: {ending(cause.code)}. Its last lines{kept}:"]
    lines += [f"  {line}" for line in last_words(outcome.tails[cause.rank])] or ["  (it printed nothing)"]
    others = ", ".join(f"rank {end.rank} {ending(end.code)}" for end in outcome.exits if end.rank != cause.rank)
    return [*lines, f"the others: {others}"] if others else lines


def ending(code: int) -> str:
    """Returns how a process ended, in words: `exit code 1`, `killed by SIGKILL`."""
    if code == FINISHED:
        return "finished"
    if code > 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
