"""The cause of a run's end: the first process that failed for a reason of its own.

If one process dies, the others follow within moments, each with its own error. Therefore, each exit is one of these:

    own        killed by a signal, aborted, or ended with an error that does not mention other processes
    symptom    its error is the loss of another process: a broken collective, JAX's coordination service, a heartbeat
    witness    its watchdog gave up, and names the ranks that block the run
    agreed     all processes ended together because of one of them: a signal, or different bits on its device

The cause is the first exit of the kind "own". If there is none, it is a process that ended with code 0 while the others
still needed it, one that is stopped (SIGSTOP) or frozen, the network if two processes ran and did not hear from each
other, or the one that a witness names. A symptom and a process named by a witness may succeed another time: the exit
code is then 75, whatever code the process itself gave.
"""

import re
import signal
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from ...mesh.exit_codes import FINISHED, TRY_AGAIN
from ...mesh.known_causes import ranks_without_heartbeat, reports_lost_peer, reports_silent_coordinator
from .output import last_words, log_file
from .process_state import RUNS

HINTS = {"killed by SIGBUS": " (a mapped file was cut while it was read, or /dev/shm is full)"}
MAX_SIGNAL = 64
MAX_NAMED_RANKS = 8
ALL_LINES = 10_000
RANKS = r"([Rr]anks? [\d, and to]*\d)"
WITNESS = re.compile(
    rf"No progress for more than [^:]*: {RANKS}(?: at | before its first step| does not answer)"
    rf"|^error: {RANKS}(?: on [^;]*| \([^)]*\))? did not come ",
    re.MULTILINE,
)
UNDETERMINED = re.compile(r"No progress for more than [^\n]*not in the same place: ([^\n]*)", re.MULTILINE)
SIGNALED = re.compile(r"^got (SIG[A-Z0-9]+): all processes of the run stop", re.MULTILINE)
ENDED_AT_ONCE = re.compile(r"^ended by SIG", re.MULTILINE)
OTHER_BITS = re.compile(r"^  \S+: (.*) (has other bits than|have other bits than|differ from each other)", re.MULTILINE)


class Exit(NamedTuple):
    """The end of one process.

    Attributes:
        rank: The rank of the process.
        code: The exit status; the negative number of the signal that killed it.
        stopped: If the launcher had already asked it to end.
    """

    rank: int
    code: int
    stopped: bool = False


class Cause(NamedTuple):
    """The cause of a run's end.

    Attributes:
        rank: The process that failed first.
        how: A description of its end.
        exit_code: The exit code of the launcher.
        witness: The rank with the most informative last lines, usually the same one.
        candidates: All ranks that may have failed first, if that cannot be determined.
    """

    rank: int
    how: str
    exit_code: int
    witness: int
    candidates: tuple[int, ...] = ()


class Outcome(NamedTuple):
    """The end of all processes.

    Attributes:
        exits: The exits in order.
        signal: The signal that ended the launcher, or None.
        tails: The last lines of each rank: from its stderr, or from its stdout if that is empty.
        states: The states of the ranks that still existed when the first process ended, if they are visible from here.
    """

    exits: tuple[Exit, ...]
    signal: signal.Signals | None
    tails: tuple[list[str], ...]
    states: Mapping[int, str] = {}

    @property
    def cause(self) -> Cause | None:
        """The cause; None if the run finished, or a signal ended the launcher."""
        return find_cause(self.exits, self.tails, self.states, was_asked=self.signal is not None)

    @property
    def exit_code(self) -> int:
        """The exit code of the launcher: that of the cause, or 75 if a signal ended it."""
        if cause := self.cause:
            return cause.exit_code
        return FINISHED if self.signal is None else TRY_AGAIN


class Complaint(Enum):
    """The complaint of a process about others."""

    BLOCKS = "is behind, or did not come"
    SILENT = "no longer publishes its progress"
    NO_HEARTBEAT = "sends no heartbeats"
    NO_ANSWER = "does not answer"


class Testimony(NamedTuple):
    """The ranks that a process names in its error, because it waited for them.

    Attributes:
        witness: The process that names them.
        ranks: The named ranks.
        complaint: The complaint about them.
    """

    witness: int
    ranks: tuple[int, ...]
    complaint: Complaint

    def explain(self, states: Mapping[int, str]) -> str:
        """Returns the possible causes, beginning with ": ", or "".

        Args:
            states: The states of the ranks, if they are visible from here.
        """
        if self.complaint is Complaint.BLOCKS:
            return ""
        runs = all(states.get(rank) == RUNS for rank in self.ranks)
        if runs and self.complaint is Complaint.SILENT:
            return ": its process runs, so Python's lock is held there, or the network loses its messages"
        if self.complaint is Complaint.NO_ANSWER:
            return f": it is stopped, frozen or dead, or the network between it and rank {self.witness} fails"
        return f": it {self.complaint.value}, so it is stopped, frozen, dead, or cut off from the network"


def find_cause(
    exits: Sequence[Exit],
    tails: Sequence[Sequence[str]],
    states: Mapping[int, str] = {},
    *,
    was_asked: bool = False,
) -> Cause | None:
    """Finds the cause of a run's end.

    Args:
        exits: The exits in order.
        tails: The last lines of each rank.
        states: The states of the ranks that still existed when the first process ended, if they are visible from here.
        was_asked: If a signal asked the launcher to end, which explains the exits after it.

    Returns:
        The cause; None if nothing failed.
    """
    failed = [end for end in exits if end.code != FINISHED and not end.stopped]
    own = next((end for end in failed if not _is_symptom(end, tails[end.rank])), None)
    if own is not None:
        agreed = _find_agreed(own, failed, tails) if own.code == TRY_AGAIN else None
        how = describe_end(own.code)
        code = TRY_AGAIN if how.startswith("killed") else own.code  # another attempt may succeed
        return agreed or Cause(own.rank, f"{how}{HINTS.get(how, '')}", code, own.rank)
    if not failed and (was_asked or not any(end.stopped for end in exits)):
        return None
    early = next((end.rank for end in exits if end.code == FINISHED and not end.stopped), None)
    if early is not None:
        return Cause(early, "ended with code 0 before the others finished", TRY_AGAIN, early)
    halted = [rank for rank, state in states.items() if state != RUNS]
    if halted:
        witness = failed[0].rank if failed else halted[0]
        return Cause(halted[0], f"{states[halted[0]]}, which blocked the others", TRY_AGAIN, witness)
    if named := _find_named(failed, tails, states):
        return named
    if not failed:
        return None
    first = failed[0]
    how = f"{describe_end(first.code)}, because it lost the others, as if the network between them had failed"
    return Cause(first.rank, how, TRY_AGAIN, first.rank)


def describe_end(code: int) -> str:
    """Returns the end of a process in words: `exit code 1`, `killed by SIGKILL`."""
    if code == FINISHED:
        return "finished"
    if 0 < code <= 128 or code > 128 + MAX_SIGNAL:
        return f"exit code {code}"
    number = -code if code < 0 else code - 128
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"killed by signal {number}"


def was_killed(code: int) -> bool:
    """Returns whether a signal other than SIGABRT ended a process: a symptom never ends like that."""
    return describe_end(code).startswith("killed") and not _was_aborted(code)


def has_lost_peer(end: Exit, tail: Sequence[str]) -> bool:
    """Returns whether a process ended because it had lost another one."""
    return not was_killed(end.code) and reports_lost_peer(_error_text(end, tail))


def _is_symptom(end: Exit, tail: Sequence[str]) -> bool:
    text = _error_text(end, tail)
    return has_lost_peer(end, tail) or bool(
        end.code == TRY_AGAIN and (_read_testimony(end, tail) or UNDETERMINED.search(text))
    )


def _was_aborted(code: int) -> bool:
    return code in (-signal.SIGABRT, 128 + signal.SIGABRT)


def _error_text(end: Exit, tail: Sequence[str]) -> str:
    """Returns the error of a process; all of its last lines if it was aborted."""
    return "\n".join(tail if _was_aborted(end.code) else last_words(list(tail), ALL_LINES, ALL_LINES))


def _read_testimony(end: Exit, tail: Sequence[str]) -> Testimony | None:
    """Returns the ranks that a watchdog, the rendezvous, or JAX's coordination service names, if any."""
    text = _error_text(end, tail)
    found = WITNESS.search(text)
    if found:
        line = text[found.start() :].partition("\n")[0]
        named = tuple(_parse_ranks(found.group(1) or found.group(2)))
        if "no longer answer" in line:
            return Testimony(end.rank, named, Complaint.SILENT)
        if "does not answer" in line:
            return Testimony(end.rank, named, Complaint.NO_ANSWER)
        return Testimony(end.rank, named, Complaint.BLOCKS)
    without_heartbeat = ranks_without_heartbeat(text)
    if without_heartbeat:
        return Testimony(end.rank, tuple(without_heartbeat), Complaint.NO_HEARTBEAT)
    if end.rank != 0 and reports_silent_coordinator(text):
        return Testimony(end.rank, (0,), Complaint.NO_ANSWER)
    return None


def _parse_ranks(text: str) -> list[int]:
    """Parses "rank 1", "ranks 0, 2 and 3" and "ranks 0 to 7"."""
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    return list(range(numbers[0], numbers[-1] + 1)) if " to " in text else numbers


def _find_named(failed: Sequence[Exit], tails: Sequence[Sequence[str]], states: Mapping[int, str]) -> Cause | None:
    """Returns the rank that a witness names; its own output is the best if it ended on its own."""
    ended = [end.rank for end in failed]
    testimonies = [testimony for end in failed if (testimony := _read_testimony(end, tails[end.rank]))]
    separated = _find_separated(testimonies, len(tails), states)
    if separated:
        return separated
    for end in failed:
        testimony = _read_testimony(end, tails[end.rank])
        named = [rank for rank in testimony.ranks if rank < len(tails)] if testimony else []
        if testimony and named:
            witness = next((rank for rank in named if rank in ended), end.rank)
            how = f"blocked the others, according to rank {end.rank}{testimony.explain(states)}"
            return Cause(named[0], how, TRY_AGAIN, witness)
        if found := UNDETERMINED.search(_error_text(end, tails[end.rank])):
            candidates = [rank for group in re.findall(RANKS, found.group(1)) for rank in _parse_ranks(group)]
            how = f"they wait for each other in different places: {found.group(1).partition(' See the stacks')[0]}"
            return Cause(min(candidates), how.rstrip("."), TRY_AGAIN, end.rank, tuple(sorted(candidates)))
    return None


def _find_separated(testimonies: Sequence[Testimony], count: int, states: Mapping[int, str]) -> Cause | None:
    """Returns the ranks that the network separated from rank 0: both ran, but did not hear from each other.

    Rank 0 stores the notes of all ranks and receives their heartbeats. If it heard from none of several others, it is
    the one that is cut off. If nobody reports from whom it heard, either end may be at fault.

    Args:
        testimonies: The testimonies of all ranks that ended on their own.
        count: The number of ranks.
        states: The states of the ranks that still existed then.
    """
    silent: set[int] = set()
    lost: set[int] = set()
    for testimony in testimonies:
        if testimony.complaint in (Complaint.SILENT, Complaint.NO_HEARTBEAT):
            silent.update(testimony.ranks)
        if testimony.complaint is Complaint.NO_HEARTBEAT:
            lost.update(rank for rank in testimony.ranks if states.get(rank) == RUNS)
    for testimony in testimonies:
        if testimony.complaint is not Complaint.NO_ANSWER or testimony.ranks != (0,):
            continue
        if testimony.witness in silent or states.get(0) == RUNS:
            lost.add(testimony.witness)
    lost = {rank for rank in lost if 0 < rank < count}
    if not lost:
        return None
    witness = testimonies[0].witness
    heard = set(range(1, count)) - silent - lost
    if count > 2 and not heard:
        candidates = [0]
    elif silent and heard:
        candidates = sorted(lost)
    else:
        candidates = [0, *sorted(lost)]
    if len(candidates) == 1:
        others = "the others" if candidates == [0] else "rank 0"
        how = f"the network lost its messages to and from {others}, though the processes ran"
        return Cause(candidates[0], how, TRY_AGAIN, witness)
    how = "the network between them lost their messages, though the processes ran"
    return Cause(candidates[0], how, TRY_AGAIN, witness, tuple(candidates))


def _find_agreed(own: Exit, failed: Sequence[Exit], tails: Sequence[Sequence[str]]) -> Cause | None:
    """Returns the process because of which all ended together; None if they did not.

    Args:
        own: The first exit of the kind "own".
        failed: All failed exits.
        tails: The last lines of each rank.
    """
    if ENDED_AT_ONCE.search("\n".join(tails[own.rank])):  # a second signal: it did not stop with the others
        return None
    for end in failed:
        if found := SIGNALED.search("\n".join(tails[end.rank])):
            return Cause(end.rank, f"got {found.group(1)}, and all stopped after one step", TRY_AGAIN, end.rank)
    found = OTHER_BITS.findall(_error_text(own, tails[own.rank]))
    ranks = sorted({int(rank) for odd, _ in found for rank in re.findall(r"\(rank (\d+)\)", odd)})
    if not ranks:
        return None
    is_one = len(ranks) == 1
    how = f"{'its device holds' if is_one else 'their devices hold'} other bits of an array than the other copies"
    return Cause(ranks[0], how, TRY_AGAIN, own.rank, () if is_one else tuple(ranks))


def summarize(outcome: Outcome, logs: Path | None) -> list[str]:
    """Returns the last lines of a launch: the error of the process that failed first, then one line about all.

    Args:
        outcome: The end of all processes.
        logs: The directory of the logs, if they are kept.

    Returns:
        The lines; none if the run finished.
    """
    cause = outcome.cause
    if cause is None:
        return [] if outcome.signal is None else [f"stopped by {outcome.signal.name}; the same command resumes the run"]
    words = [f"  {line}" for line in last_words(outcome.tails[cause.witness])]
    code = "" if cause.how == describe_end(cause.exit_code) else f" (exit code {cause.exit_code})"
    owner = "Its last lines" if cause.witness == cause.rank else f"The last lines of rank {cause.witness}"
    printed = f"{owner} are above" if words else "It printed nothing"
    log = f", all of them in {log_file(logs, cause.witness)}" if logs and words else ""
    first = f"rank {cause.rank} failed first"
    if cause.candidates:
        first = f"{_join_ranks([*cause.candidates])} may have failed first, which cannot be determined"
    return [*words, f"{first}: {cause.how}{code}. {printed}{log}{_describe_others(outcome, cause.rank)}"]


def _describe_others(outcome: Outcome, cause: int) -> str:
    """Describes the ends of the other ranks; ranks that ended alike are grouped."""
    alike: dict[str, list[int]] = {}
    for end in outcome.exits:
        if end.rank == cause:
            continue
        why = ""
        if end.stopped:
            why = " (stopped by the launcher)" if end.code else ""
        elif has_lost_peer(end, outcome.tails[end.rank]):
            why = " (it lost another process)"
        alike.setdefault(f"{describe_end(end.code)}{why}", []).append(end.rank)
    others = [f"{_join_ranks(ranks)} {how}" for how, ranks in alike.items()]
    return f"; {', '.join(others)}" if others else ""


def _join_ranks(ranks: list[int]) -> str:
    if len(ranks) > MAX_NAMED_RANKS:
        return f"{len(ranks)} others"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
