"""Notes in which processes publish their progress, time limits, and the verdict about which process blocks a run."""

from collections.abc import Sequence
from typing import NamedTuple

from ...configs.schema import Timeouts
from ...mesh.processes import ranks

DEVICE_WAITS = tuple(
    f"({file})"
    for file in (
        "training/steps/late_log.py",
        "training/steps/not_finite.py",
        "training/loop.py",
        "checkpoints/replicas.py",
        "parallel/step/train_step.py",
        "mesh/processes.py",
    )
)
"""Files with functions that wait for devices, which wait for those of other processes."""
AGAIN = "The same command goes on from the latest checkpoint."


class Note(NamedTuple):
    """The progress of a process.

    Attributes:
        step: The current step, or the one that it waits to begin.
        phase: The phase: "data", "step", "evaluation", "save".
        seconds: The time in this phase.
        done: Completed parts of the phase: batches of an evaluation.
        at: The current function and its file; "" if unknown.
        is_free: True if this is the user's code and its devices have computed everything, so that it waits for nobody.
    """

    step: int
    phase: str
    seconds: float
    done: int = 0
    at: str = ""
    is_free: bool = False

    def __str__(self) -> str:
        part = f" after {self.done} batch{'' if self.done == 1 else 'es'}" if self.done else ""
        return f"step {self.step}, {self.phase}{part}, for {self.seconds:.0f} s"

    @property
    def waits(self) -> bool:
        """True if the process waits for its devices, so that it may not be the cause."""
        return self.at.endswith(DEVICE_WAITS)

    @property
    def place(self) -> tuple[int, int, int]:
        """The position: waiting for data is before the step, and work between two steps is after it."""
        return self.step, ("data", "step").index(self.phase) if self.phase in ("data", "step") else 2, self.done


class Deadlines:
    """The time limits of the phases."""

    def __init__(self, timeouts: Timeouts) -> None:
        self.first = 1
        self._timeouts = timeouts

    def of(self, note: Note) -> tuple[float, str]:
        """Returns the time limit of a note's phase, 0 = none, and the key of the config that sets it."""
        first = note.step == self.first and note.phase in ("data", "step")
        name = "first_step" if first else note.phase
        own = getattr(self._timeouts, name, 0)
        return (own, f"timeouts.{name}") if own else (self._timeouts.step, "timeouts.step")

    def passed(self, note: Note) -> bool:
        """Returns True if the limit is exceeded."""
        seconds, _ = self.of(note)
        return 0 < seconds < note.seconds

    def may_go_on(self, note: Note, waiting: Note) -> bool:
        """Returns True if a process is within its own limit, which is longer than that of the waiting process."""
        seconds, shorter = self.of(note)[0], self.of(waiting)[0]
        return (seconds == 0 or seconds > shorter) and not self.passed(note)


def verdict(notes: Sequence[Note | None], silent: Sequence[int], seconds: float, key: str = "timeouts.step") -> str:
    """Returns which ranks block a run.

    Args:
        notes: The note of each rank; None if a rank has published none.
        silent: Ranks that no longer publish.
        seconds: The time limit of the phase.
        key: The key of the config that sets it.
    """
    prefix = f"No progress for more than {seconds:.0f} s ({key})"
    if len(notes) == 1:
        return f"{prefix}: {notes[0]}. The stacks of all threads are above. {AGAIN}"
    if silent:
        last = f"at {notes[silent[0]]}" if notes[silent[0]] else "before its first step"
        s = "s" if len(silent) == 1 else ""
        return (
            f"{prefix}: {ranks(silent)} {last}, no longer answer{s}: stopped, frozen, dead, cut off from the "
            f"network, or Python's lock is held there. {_others(notes, silent)} {AGAIN}"
        )
    present = {rank: note for rank, note in enumerate(notes) if note is not None}
    first = min(note.place for note in present.values())
    behind = [rank for rank, note in present.items() if note.place == first]
    if len(behind) == len(notes) or (len(present) == len(notes) and all(note.waits for note in present.values())):
        return f"{prefix}: {_in_one_phase(present)} {AGAIN}"
    return f"{prefix}: {ranks(behind)} at {notes[behind[0]]}{_in(notes[behind[0]])}. {_others(notes, behind)} {AGAIN}"


def without_service(now: Note, rank: int, seconds: float, key: str) -> str:
    """Returns the message that process 0, which stores the notes of all, does not answer.

    Args:
        now: The note of this process.
        rank: This process.
        seconds: The time limit of the phase.
        key: The key of the config that sets it.
    """
    return (
        f"No progress for more than {seconds:.0f} s ({key}): rank 0 does not answer: it is stopped or frozen, or the "
        f"network between it and rank {rank} fails. Rank {rank} waits at {now}. {AGAIN}"
    )


def _in_one_phase(notes: dict[int, Note]) -> str:
    """Distinguishes ranks that are at the same step and phase, or that all wait for their devices.

    Ranks in the user's code whose devices have nothing to do block the others. Otherwise, if fewer than half are in one
    place, and all others in another, these few block the run. If two ranks differ, either can be the one that skipped a
    collective.
    """
    free = [rank for rank, note in notes.items() if note.is_free]
    if 0 < len(free) < len(notes):
        return f"{ranks(free)} at {notes[free[0]]}{_in(notes[free[0]])}. {_others(list(notes.values()), free)}"
    in_step = len({note.place for note in notes.values()}) == 1
    groups: dict[object, list[int]] = {}
    for rank, note in notes.items():
        groups.setdefault(note.at if in_step else (note.place, note.at), []).append(rank)
    everybody = f"all ranks are at {notes[0]}" if in_step else "all ranks wait for their devices"
    if len(groups) == 1:
        return (
            f"{everybody}{_in(notes[0])}: see the stacks in their logs. If they are in the same collective, "
            "the network between two of them loses messages, or a device hangs."
        )
    few, *others = sorted(groups.values(), key=len)
    if len(groups) == 2 and len(few) < len(others[0]):
        return f"{ranks(few)} at {notes[few[0]]}{_in(notes[few[0]])}. {_others(list(notes.values()), few)}"
    at = [(group, notes[group[0]]) for group in groups.values()]
    places = "; ".join(f"{ranks(group)}{'' if in_step else f' at {note}'}{_in(note)}" for group, note in at)
    return f"{everybody}, but not in the same place: {places}. See the stacks in their logs."


def _in(note: Note | None) -> str:
    return f", in {note.at}" if note and note.at else ""


def _others(notes: Sequence[Note | None], named: Sequence[int]) -> str:
    others = [each for each in range(len(notes)) if each not in named]
    if not others:
        return ""
    note, s = notes[others[0]], "s" if len(others) == 1 else ""
    return f"{ranks(others).capitalize()} wait{s} {f'at {note}{_in(note)}' if note else 'before the first step'}."
