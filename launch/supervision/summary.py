"""The last words of a launch: what failed first, with which code the launch ends, and what that process said."""

from pathlib import Path

from .blame import Exit, ending, is_lost_peer
from .output import last_words, log_file
from .processes import Outcome

MOST_NAMED = 8
"""Ranks that ended alike."""


def summary(outcome: Outcome, logs: Path | None) -> list[str]:
    """Returns the last lines of a launch: none where all is well; else what the first to fail said, and one line.

    The line stands last: who failed first and how, where all of its lines are, and how the others ended.

    Args:
        outcome: How the processes ended.
        logs: The folder of their output, where it is kept.
    """
    cause = outcome.cause
    if cause is None:
        return [] if outcome.signal is None else [f"stopped by {outcome.signal.name}; the same command goes on"]
    words = [f"  {line}" for line in last_words(outcome.tails[cause.witness])]
    code = "" if cause.how == ending(cause.exit_code) else f" (exit code {cause.exit_code})"
    whose = "Its last lines" if cause.witness == cause.rank else f"The last lines of rank {cause.witness}"
    said = f"{whose} are above" if words else "It printed nothing"
    kept = f", all of them in {log_file(logs, cause.witness)}" if logs and words else ""
    first = f"rank {cause.rank} failed first"
    if cause.candidates:
        first = f"{_ranks([*cause.candidates])} may have failed first, which cannot be determined"
    line = f"{first}: {cause.how}{code}. {said}{kept}{_others(outcome, cause.rank)}"
    return [*words, line]


def _others(outcome: Outcome, cause: int) -> str:
    """How the others ended: ranks that ended alike together."""
    alike: dict[str, list[int]] = {}
    for end in outcome.exits:
        if end.rank != cause:
            alike.setdefault(_ending(end, outcome), []).append(end.rank)
    told = [f"{_ranks(ranks)} {how}" for how, ranks in alike.items()]
    return f"; {', '.join(told)}" if told else ""


def _ranks(ranks: list[int]) -> str:
    if len(ranks) > MOST_NAMED:
        return f"{len(ranks)} others"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def _ending(end: Exit, outcome: Outcome) -> str:
    """How one of the others ended: of itself, because it had lost another, or because it was told to."""
    why = ""
    if end.stopped:
        why = " (told to end)" if end.code else ""
    elif is_lost_peer(end, outcome.tails[end.rank]):
        why = " (it lost another)"
    return f"{ending(end.code)}{why}"
