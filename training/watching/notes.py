"""What each process notes that it does, and what the notes of all say of who holds a run up."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...mesh.coordination import ranks

DEVICE_WAITS = tuple(
    f"({file})"
    for file in (
        "training/steps/late_log.py",
        "training/steps/not_finite.py",
        "training/loop.py",
        "training/watching/replicas.py",
        "parallel/step/train_step.py",
        "mesh/processes.py",
    )
)
"""Files whose functions wait for devices, which wait for those of other processes."""
AGAIN = "The same command goes on from the newest checkpoint."


class Note(NamedTuple):
    """What a process is doing.

    Attributes:
        step: the step under way, or the one it waits to begin.
        phase: "data", "step", "evaluation", "save".
        seconds: for how long.
        done: parts of the phase that are behind it: batches of an evaluation.
        at: the function that it is in, and its file; "" where that is not known.
    """

    step: int
    phase: str
    seconds: float
    done: int = 0
    at: str = ""

    def __str__(self) -> str:
        part = f" after {self.done} batch{'' if self.done == 1 else 'es'}" if self.done else ""
        return f"step {self.step}, {self.phase}{part}, for {self.seconds:.0f} s"

    @property
    def waits(self) -> bool:
        """Whether the process waits for its devices, so that nobody knows whether it is the cause."""
        return self.at.endswith(DEVICE_WAITS)

    @property
    def place(self) -> tuple[int, int, int]:
        """How far it has come: to wait for data is before the step, what comes between two steps is after it."""
        return self.step, ("data", "step").index(self.phase) if self.phase in ("data", "step") else 2, self.done


def verdict(notes: Sequence[Note | None], silent: Sequence[int], seconds: float, key: str = "timeouts.step") -> str:
    """Says who holds a run up.

    Args:
        notes: What each rank does; None of a rank that has published nothing.
        silent: Ranks that publish nothing any more.
        seconds: The longest that a phase may take.
        key: The key of the config that says so.
    """
    said = f"No progress for more than {seconds:.0f} s ({key})"
    if len(notes) == 1:
        return f"{said}: {notes[0]}. The stacks of all threads are above. {AGAIN}"
    if silent:
        last = f"at {notes[silent[0]]}" if notes[silent[0]] else "before its first step"
        return (
            f"{said}: {ranks(silent)} {last}, no longer answer{'s' if len(silent) == 1 else ''}: stopped, dead, or "
            f"Python's lock is held there. {_others(notes, silent)} {AGAIN}"
        )
    present = {rank: note for rank, note in enumerate(notes) if note is not None}
    first = min(note.place for note in present.values())
    behind = [rank for rank, note in present.items() if note.place == first]
    if len(behind) == len(notes) or (len(present) == len(notes) and all(note.waits for note in present.values())):
        return f"{said}: {_in_one_phase(present)} {AGAIN}"
    return f"{said}: {ranks(behind)} at {notes[behind[0]]}{_in(notes[behind[0]])}. {_others(notes, behind)} {AGAIN}"


def without_service(now: Note, rank: int, seconds: float, key: str) -> str:
    """Says that process 0, which keeps the notes of all, does not answer.

    Args:
        now: What this process does.
        rank: This process.
        seconds: The longest that this may take.
        key: The key of the config that says so.
    """
    return (
        f"No progress for more than {seconds:.0f} s ({key}): rank 0 does not answer: it is stopped, or its host cannot "
        f"be reached. Rank {rank} waits at {now}. {AGAIN}"
    )


def _in_one_phase(notes: dict[int, Note]) -> str:
    """Tells ranks apart that are at the same step and phase, or that all wait for their devices.

    Fewer than half that are in one place, while all others are in another, are named as those that hold the run up; of
    two ranks that differ, nobody knows which one it is: one of them has left a collective out.
    """
    in_step = len({note.place for note in notes.values()}) == 1
    groups = _grouped(notes, lambda note: note.at if in_step else str((note.place, note.at)))
    everybody = f"all ranks are at {notes[0]}" if in_step else "all ranks wait for their devices"
    if len(groups) == 1:
        return f"{everybody}{_in(notes[0])}: see the stacks in their logs."
    few, *others = sorted(groups.values(), key=len)
    if len(groups) == 2 and len(few) < len(others[0]):
        return f"{ranks(few)} at {notes[few[0]]}{_in(notes[few[0]])}. {_others(list(notes.values()), few)}"
    at = [(group, notes[group[0]]) for group in groups.values()]
    places = "; ".join(f"{ranks(group)}{'' if in_step else f' at {note}'}{_in(note)}" for group, note in at)
    return f"{everybody}, but not in the same place: {places}. See the stacks in their logs."


def _grouped(notes: dict[int, Note], by: Callable[[Note], str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, note in notes.items():
        groups.setdefault(by(note), []).append(rank)
    return groups


def _in(note: Note | None) -> str:
    return f", in {note.at}" if note and note.at else ""


def _others(notes: Sequence[Note | None], named: Sequence[int]) -> str:
    others = [each for each in range(len(notes)) if each not in named]
    if not others:
        return ""
    note, s = notes[others[0]], "s" if len(others) == 1 else ""
    return f"{ranks(others).capitalize()} wait{s} {f'at {note}{_in(note)}' if note else 'before the first step'}."
