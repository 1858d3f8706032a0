"""What became of each fault, as the journal tells: noticed after how long, trained again after how long, steps lost."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from .journal import Journal

HARMLESS = ("pause", "slow")
"""Kinds that end nothing."""
BEFORE_THE_STEP = ("read", "data", "batch", "step")
"""Phases in which the step they name is not done yet."""


class Recovery(NamedTuple):
    """What became of one fault.

    Attributes:
        number: Of the fault, in the list of the run.
        kind: Of the fault.
        detected: Seconds until every process had ended; None where none had to.
        recovered: Seconds until the first step of the next attempt; None where there was none.
        lost: Steps that were trained again; None the same.
        rank: Whom the launcher named; None where nobody.
        how: What that process did, in its words.
        code: What the launcher ended that attempt with; None where it went on.
    """

    number: int
    kind: str
    detected: float | None = None
    recovered: float | None = None
    lost: int | None = None
    rank: int | None = None
    how: str = "went on"
    code: int | None = None

    def __str__(self) -> str:
        if self.detected is None:
            return f"{self.kind}: {self.how}"
        again = "not trained again" if self.recovered is None else f"trained again after {self.recovered:.1f} s"
        return (
            f"{self.kind}: all ended after {self.detected:.1f} s, {again}, {self.lost} steps lost, rank {self.rank} "
            f"{self.how}, code {self.code}"
        )


def recoveries(journal: Journal) -> list[Recovery]:
    """What became of the faults of a run, in the order they were injected.

    Args:
        journal: Of all its attempts. A damaged checkpoint has no line of its own: it shows in the next fault's.
    """
    events = journal.events()
    return [
        _recovery(event, events[number + 1 :])
        for number, event in enumerate(events)
        if event["event"] == "fault" and event["kind"] != "damage"
    ]


def _recovery(event: dict[str, Any], later: Sequence[dict[str, Any]]) -> Recovery:
    ended = next((each for each in later if each["event"] in ("ended", "attempt")), None)
    if event["kind"] in HARMLESS or ended is None or ended["event"] != "ended" or ended["code"] == 0:
        return Recovery(event["index"], event["kind"])
    again = next((each for each in later[later.index(ended) :] if each["event"] == "training"), None)
    done = (event["step"] or 0) - (event["phase"] in BEFORE_THE_STEP)
    rank, how = ended["cause"][:2] if ended["cause"] else (None, "a signal")
    return Recovery(
        event["index"],
        event["kind"],
        detected=ended["time"] - event["time"],
        recovered=again["time"] - event["time"] if again else None,
        lost=max(0, done - (again["step"] - 1)) if again else None,
        rank=rank,
        how=how,
        code=ended["code"],
    )
