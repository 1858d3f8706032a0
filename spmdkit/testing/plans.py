"""Which faults a soak injects: drawn at random from a table of kinds, a few steps apart, the same for the same seed."""

# pyright: reportMissingImports=false

import random
from collections.abc import Callable
from typing import NamedTuple

from .faults import Fault

Draw = random.Random
"""Where the random choices come from."""


SPARED = 3
"""Saves at whose beginning nothing is damaged: when the third begins the second may still be written, and the first is
the only one that is complete for sure."""


class Place(NamedTuple):
    """Where a fault is to be injected.

    Attributes:
        rank: Which process.
        step: At which step.
        saved: The first step at or after it whose checkpoint is saved.
        evaluated: The first at or after it that an evaluation follows.
    """

    rank: int
    step: int
    saved: int
    evaluated: int


def _one(kind: str, phase: str, **options: object) -> Callable[[Place], list[Fault]]:
    def faults(place: Place) -> list[Fault]:
        step = {"save": place.saved, "evaluation": place.evaluated}.get(phase.partition(":")[0], place.step)
        rank = 0 if phase.startswith("save:") and phase != "save:arrays" else place.rank
        return [Fault(kind=kind, phase=phase, rank=rank, step=step, **options)]  # pyright: ignore[reportArgumentType]

    return faults


def _damaged(how: str) -> Callable[[Place], list[Fault]]:
    """The newest checkpoint is damaged, and the process that has it in memory is killed."""

    def faults(place: Place) -> list[Fault]:
        damaged = Fault(kind="damage", how=how, rank=0, phase="save", step=place.saved)
        return [damaged, Fault(kind="kill", rank=0, phase="save", step=place.saved)]

    return faults


def _during_recovery(place: Place) -> list[Fault]:
    """Killed, and killed again while the checkpoint is read."""
    first = Fault(kind="kill", rank=place.rank, step=place.step)
    return [first, Fault(kind="kill", phase="restore", rank=place.rank)]


KINDS: dict[str, Callable[[Place], list[Fault]]] = {
    "killed in a step": _one("kill", "step"),
    "killed while it waits for data": _one("kill", "data"),
    "killed in an evaluation": _one("kill", "evaluation"),
    "killed before a save": _one("kill", "save"),
    "killed before the folder of a save": _one("kill", "save:folder"),
    "killed while arrays are written": _one("kill", "save:arrays"),
    "killed before the description": _one("kill", "save:metadata"),
    "killed before the commit": _one("kill", "save:commit"),
    "killed again while it restores": _during_recovery,
    "aborted": _one("abort", "step"),
    "segmentation fault": _one("segv", "step"),
    "ended with code 0": _one("exit", "step"),
    "exception": _one("raise", "step"),
    "reader raises an I/O error": _one("raise", "read", error="EIO"),
    "hangs": _one("hang", "step"),
    "hangs with Python's lock": _one("hold", "data"),
    "stopped (SIGSTOP)": _one("stop", "step"),
    "SIGTERM to one rank": _one("signal", "step"),
    "SIGTERM, then SIGKILL": _one("signal", "step", signals=("SIGTERM", "SIGKILL"), seconds=0.3),
    "SIGTERM while it waits for data": _one("signal", "data"),
    "stands still for a second": _one("pause", "step", seconds=1.0),
    "a value of the batch is not a number": _one("nan", "batch"),
    "checkpoint with flipped bits": _damaged("flip"),
    "checkpoint with cut files": _damaged("truncate"),
    "checkpoint without files": _damaged("empty"),
}
"""What happens -> the faults that make it."""


class Planned(NamedTuple):
    """A fault of a plan.

    Attributes:
        name: One of KINDS.
        faults: What is injected; one or two.
    """

    name: str
    faults: list[Fault]


def plan(seed: int, *, steps: int, processes: int, every: float, save_every: int, eval_every: int = 0) -> list[Planned]:
    """Draws the faults of a run.

    Args:
        seed: Of the choices.
        steps: Of the run.
        processes: Of the run.
        every: Steps between two faults, on average; the distances are exponentially distributed, at least one step.
        save_every: `checkpoint.every`; 0 saves at the end alone.
        eval_every: `eval.every`; 0 evaluates at the end alone.

    Returns:
        The faults in the order of their steps, each kind once before any comes twice. The first comes after the first
        checkpoint, where there is one before the end.
    """
    draw = Draw(seed)
    names: list[str] = []
    found: list[Planned] = []
    step = float(save_every if 0 < save_every < steps else 0)
    while True:
        step += max(1.0, draw.expovariate(1 / every))
        if step >= steps:
            return found
        if not names:
            names = draw.sample(list(KINDS), len(KINDS))
        number = int(step) + 1
        while names[-1].startswith("checkpoint") and number <= SPARED * save_every:
            names.insert(0, names.pop())  # there has to be one before it, which is complete
        name = names.pop()
        saved, evaluated = (_next(number, each, steps) for each in (save_every, eval_every))
        found.append(Planned(name, KINDS[name](Place(draw.randrange(processes), number, saved, evaluated))))


def _next(step: int, every: int, steps: int) -> int:
    """The first multiple of `every` at or after a step; the last step where there is none."""
    return min(-(-step // every) * every, steps) if every else steps
