"""Whose fault it was: of several processes that ended badly, the one that did so first and of itself.

When one process dies the others follow within moments, each with an error of its own. So an exit is one of these:

    its own        killed by a signal, aborted, or ended with an error that says nothing of other processes
    a symptom      its last words are those of a process that has lost another: a collective that broke, JAX's
                   coordination service, a heartbeat
    a witness      its watchdog gave up, and names the ranks that hold the run up
    agreed         all processes ended together, because of one of them: a signal to it, or other bits on its device

The cause is the first exit that is its process's own. Where there is none, it is a process that ended with code 0
while others still needed it, or one that is stopped (SIGSTOP), or the one that a witness names. What is a symptom or
told by a witness may end otherwise another time: its code is 75, whatever the process itself gave.
"""

import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from ...training.ending.exits import FINISHED, TRY_AGAIN
from ...training.ending.lost_peers import tells_of_lost_peer, without_heartbeat
from .output import last_words

MOST_SIGNALS = 64
RANKS = r"([Rr]anks? [\d, and to]*\d)"
WITNESS = re.compile(
    rf"No progress for more than [^:]*: {RANKS}(?: at | before its first step| does not answer)"
    rf"|^error: {RANKS}(?: on [^;]*| \([^)]*\))? did not come ",
    re.MULTILINE,
)
UNDETERMINED = re.compile(r"No progress for more than [^\n]*not in the same place: ([^\n]*)", re.MULTILINE)
SIGNALLED = re.compile(r"^got (SIG[A-Z0-9]+): all processes of the run stop", re.MULTILINE)
ENDED_AT_ONCE = re.compile(r"^ended by SIG", re.MULTILINE)
OTHER_BITS = re.compile(r"^  \S+: (.*) (has other bits than|have other bits than|differ from each other)", re.MULTILINE)
ALL_OF_THEM = 10_000
"""Lines: of the last words, all."""


class Exit(NamedTuple):
    """The end of one process.

    Attributes:
        rank: Whose.
        code: Exit status; the negative number of the signal that killed it.
        stopped: Whether it ended after it was told to.
    """

    rank: int
    code: int
    stopped: bool = False


class Cause(NamedTuple):
    """What ended a run.

    Attributes:
        rank: Whose fault it was.
        how: How that process ended, or what it did, in words.
        exit_code: What the launcher exits with.
        witness: The rank whose last lines say most: mostly itself.
        candidates: All ranks whose fault it may be, if that cannot be determined.
    """

    rank: int
    how: str
    exit_code: int
    witness: int
    candidates: tuple[int, ...] = ()


def find_cause(
    exits: Sequence[Exit], tails: Sequence[Sequence[str]], halted: Sequence[int] = (), *, asked: bool = False
) -> Cause | None:
    """Finds out what ended a run.

    Args:
        exits: In the order the processes ended.
        tails: The last lines of each rank.
        halted: Ranks that were found stopped (SIGSTOP) when the first ended.
        asked: Whether the launcher was told to end by a signal, so that exits after it are nobody's fault.

    Returns:
        The cause; None where all is well.
    """
    bad = [end for end in exits if end.code != FINISHED and not end.stopped]
    own = next((end for end in bad if not _is_symptom(end, tails[end.rank])), None)
    if own is not None and own.code == TRY_AGAIN and (agreed := _agreed(own, bad, tails)):
        return agreed
    if own is not None:
        return Cause(own.rank, ending(own.code), _code(own.code), own.rank)
    if asked and not bad:
        return None
    if not bad and not any(end.stopped for end in exits):
        return None
    early = next((end.rank for end in exits if end.code == FINISHED and not end.stopped), None)
    if early is not None:
        return Cause(early, "ended with code 0 before the others were done", TRY_AGAIN, early)
    if halted:
        witness = bad[0].rank if bad else halted[0]
        return Cause(halted[0], "stopped (SIGSTOP), so that the others waited for it", TRY_AGAIN, witness)
    return _told(bad, tails) or (_first(bad) if bad else None)


def is_lost_peer(end: Exit, tail: Sequence[str]) -> bool:
    """Tells whether a process ended because it had lost another."""
    return not was_killed(end.code) and tells_of_lost_peer(_words(end, tail))


def ending(code: int) -> str:
    """Returns how a process ended, in words: `exit code 1`, `killed by SIGKILL`."""
    if code == FINISHED:
        return "finished"
    if 0 < code <= 128 or code > 128 + MOST_SIGNALS:
        return f"exit code {code}"
    number = -code if code < 0 else code - 128
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"killed by signal {number}"


def was_killed(code: int) -> bool:
    """Tells whether a signal other than that of an abort ended a process: nothing that it lost does that."""
    return ending(code).startswith("killed") and not _aborted(code)


def _is_symptom(end: Exit, tail: Sequence[str]) -> bool:
    words = _words(end, tail)
    return is_lost_peer(end, tail) or bool(end.code == TRY_AGAIN and (_named(words) or UNDETERMINED.search(words)))


def _aborted(code: int) -> bool:
    return code in (-signal.SIGABRT, 128 + signal.SIGABRT)


def _code(code: int) -> int:
    """The launcher's exit code for that of a process: what a signal killed may live another time."""
    return TRY_AGAIN if ending(code).startswith("killed") else code


def _words(end: Exit, tail: Sequence[str]) -> str:
    """What a process said at its end: of an abort all there is, of an error its own words."""
    return "\n".join(tail if _aborted(end.code) else last_words(list(tail), ALL_OF_THEM, ALL_OF_THEM))


def _named(text: str) -> list[int]:
    """The ranks that a witness names: as the watchdog says it, the meeting of processes, or JAX's service."""
    found = WITNESS.search(text)
    return _ranks(found.group(1) or found.group(2)) if found else without_heartbeat(text)


def _ranks(text: str) -> list[int]:
    """Reads "rank 1", "ranks 0, 2 and 3" and "ranks 0 to 7"."""
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    return list(range(numbers[0], numbers[-1] + 1)) if " to " in text else numbers


def _told(bad: Sequence[Exit], tails: Sequence[Sequence[str]]) -> Cause | None:
    """The rank that a witness names; its own words are the best where it has ended by itself."""
    ended = [end.rank for end in bad]
    for end in bad:
        named = [rank for rank in _named(_words(end, tails[end.rank])) if rank < len(tails)]
        if named:
            own = next((rank for rank in named if rank in ended), None)
            witness = end.rank if own is None else own
            return Cause(named[0], f"held the others up, as rank {end.rank} tells", TRY_AGAIN, witness)
        if found := UNDETERMINED.search(_words(end, tails[end.rank])):
            candidates = [rank for group in re.findall(RANKS, found.group(1)) for rank in _ranks(group)]
            how = f"they wait for each other in different places: {found.group(1).partition(' See the stacks')[0]}"
            return Cause(min(candidates), how.rstrip("."), TRY_AGAIN, end.rank, tuple(sorted(candidates)))
    return None


def _agreed(own: Exit, bad: Sequence[Exit], tails: Sequence[Sequence[str]]) -> Cause | None:
    """The process because of which all have ended together; None if they have not.

    Args:
        own: The first that ended.
        bad: All that ended badly.
        tails: The last lines of each rank.
    """
    if ENDED_AT_ONCE.search("\n".join(tails[own.rank])):  # a second signal: it has not stopped with the others
        return None
    for end in bad:
        if found := SIGNALLED.search("\n".join(tails[end.rank])):
            return Cause(end.rank, f"got {found.group(1)}, and all stopped after one step", TRY_AGAIN, end.rank)
    found = OTHER_BITS.findall(_words(own, tails[own.rank]))
    ranks = sorted({int(rank) for odd, _ in found for rank in re.findall(r"\(rank (\d+)\)", odd)})
    if not ranks:
        return None
    is_one = len(ranks) == 1
    how = f"{'its device holds' if is_one else 'their devices hold'} other bits of an array than the copies elsewhere"
    return Cause(ranks[0], how, TRY_AGAIN, own.rank, () if is_one else tuple(ranks))


def _first(bad: Sequence[Exit]) -> Cause:
    """All lost one another, as when a network goes: the first of them."""
    return Cause(bad[0].rank, f"{ending(bad[0].code)}, because it lost the others", TRY_AGAIN, bad[0].rank)
