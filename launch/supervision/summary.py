"""The last words of a launch: what failed first, with which code the launch ends, and what that process said."""

from pathlib import Path

from .blame import Exit, ending, is_lost_peer
from .output import last_words, log_file
from .processes import Outcome


def summary(outcome: Outcome, logs: Path | None) -> list[str]:
    """Returns the last lines of a launch: none where all is well; else how all ended, who was first, and its words.

    Args:
        outcome: How the processes ended.
        logs: The folder of their output, where it is kept.
    """
    cause = outcome.cause
    if cause is None:
        return [] if outcome.signal is None else [f"stopped by {outcome.signal.name}; the same command goes on"]
    others = ", ".join(_ending(end, outcome) for end in outcome.exits if end.rank != cause.rank)
    code = "" if cause.how == ending(cause.exit_code) else f" (exit code {cause.exit_code})"
    whose = "Its last lines" if cause.witness == cause.rank else f"The last lines of rank {cause.witness}"
    kept = f", all of them in {log_file(logs, cause.witness)}" if logs else ""
    lines = [f"the others: {others}"] if others else []
    lines.append(f"rank {cause.rank} failed first: {cause.how}{code}. {whose}{kept}:")
    return lines + ([f"  {line}" for line in last_words(outcome.tails[cause.witness])] or ["  (it printed nothing)"])


def _ending(end: Exit, outcome: Outcome) -> str:
    """How one of the others ended: of itself, because it had lost another, or because it was told to."""
    why = ""
    if end.stopped:
        why = " (told to end)" if end.code else ""
    elif is_lost_peer(end, outcome.tails[end.rank]):
        why = " (it lost another)"
    return f"rank {end.rank} {ending(end.code)}{why}"
