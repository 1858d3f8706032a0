"""A soak: trains a config under random faults until the run finishes: `python -m support.soak CONFIG`.

The run is trained twice: undisturbed, and with a fault every few steps on a random rank, each of another kind. After a
fault the run restarts, by `--restarts` or by the same command if the launcher does not restart it (an exception, a loss
that diverged). The soak succeeds if both runs have the same losses and the same bits in every array.

  PYTHONPATH=tests python -m support.soak quickstart --minutes 10 --processes 2 --devices 2 --seed 0

Exit codes: 0 if the runs are the same, 1 if they differ, 75 if the disturbed run did not finish.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from spmdkit.configs import load_config
from spmdkit.mesh.errors import UserError
from spmdkit.mesh.exit_codes import FAILED, FINISHED, INVALID_INPUT, TRY_AGAIN
from support.cluster import cluster
from support.faults import Fault, Journal
from support.runs import same_run

RESTARTS = 8
"""Restarts in a row without a newer checkpoint: faults come faster than checkpoints now and then."""
ATTEMPT_SECONDS = 900.0
"""The longest that the launcher may take without an end."""
KEEP = 6
"""Checkpoints: two of them may be damaged before a further one is saved."""
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
    draw = random.Random(seed)
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


def main(words: Sequence[str] | None = None) -> int:
    """Runs a soak; returns its exit code."""
    given = _arguments(words)
    overrides = [*given.overrides, f"timeouts.step={given.deadline}", f"checkpoint.keep={KEEP}"]
    config = load_config(given.config, overrides, num_processes=given.processes, simulate=given.devices)
    faults = plan(
        given.seed,
        steps=config.train.steps,
        processes=given.processes,
        every=given.every,
        save_every=config.checkpoint.every,
        eval_every=config.eval.every,
    )
    place = Path(given.folder or tempfile.mkdtemp(prefix="spmdkit-soak-")).absolute()
    if (place / "undisturbed").exists() or (place / "disturbed").exists():
        raise UserError(f"--folder {place} holds another soak: give an empty one.")
    say(
        f"{len(faults)} faults of {len({each.name for each in faults})} kinds in {config.train.steps} steps, in {place}"
    )
    shape: dict[str, Any] = {"processes": given.processes, "devices": given.devices}
    with cluster(given.config, overrides=[*overrides, f"run.dir={place / 'undisturbed'}"], **shape) as run:
        ended = run.wait(ATTEMPT_SECONDS)
        if ended.code != FINISHED:
            say(f"the undisturbed run ended with {ended.code}:\n{ended.stderr[-2000:]}")
            return ended.code
    begin = time.monotonic()
    finished = disturb(
        given.config, [*overrides, f"run.dir={place / 'disturbed'}"], faults, place, given.minutes, shape
    )
    found = recoveries(Journal(place / "journal.jsonl"))
    print("\n".join(as_markdown(faults, found)))
    print("\n" + summary(faults, found, time.monotonic() - begin))
    if not finished:
        say(f"the disturbed run did not end by itself within {given.minutes} minutes and the time to finish")
        return TRY_AGAIN
    problems = same_run(place / "disturbed", place / "undisturbed")
    say("\n".join(problems) if problems else "every loss and every bit of every array is that of the undisturbed run")
    return FAILED if problems else FINISHED


def disturb(
    config: str, overrides: Sequence[str], faults: Sequence[Planned], place: Path, minutes: float, shape: dict[str, Any]
) -> bool:
    """Trains under faults, again and again until the run has ended by itself.

    Args:
        config: The config.
        overrides: Values over it; `run.dir` among them.
        faults: What goes wrong.
        place: The folder of the soak, for the journal.
        minutes: How long faults are injected; what has not come by then is left out.
        shape: `processes` and `devices`.

    Returns:
        Whether it has ended by itself.
    """
    journal, deadline = place / "journal.jsonl", time.monotonic() + minutes * 60
    injected = [fault for each in faults for fault in each.faults]
    options: dict[str, Any] = {"overrides": overrides, "restarts": RESTARTS, "journal": journal, **shape}
    code = TRY_AGAIN
    while code not in (FINISHED, INVALID_INPUT) and time.monotonic() < deadline:
        with cluster(config, faults=injected, **options) as run, suppress(TimeoutError):
            code = run.wait(max(1.0, deadline - time.monotonic())).code
            say(f"ended with code {code}" + ("" if code == FINISHED else "; the same command again"))
    if code not in (FINISHED, INVALID_INPUT):
        say(f"{minutes} minutes are over: no more faults, the run goes on to its end")
        with cluster(config, **options) as run:
            code = run.wait(ATTEMPT_SECONDS).code
    return code == FINISHED


def as_markdown(faults: Sequence[Planned], found: Sequence[Recovery]) -> list[str]:
    """A table of what became of the faults of a plan, in the order they were injected."""
    names = _names(faults)
    lines = [
        "| # | fault | where | detected, all ended | trains again | steps again | named | code |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for number, each in enumerate(found, 1):
        name, fault = names[each.number]
        where = f"rank {fault.rank}, {fault.phase}{'' if fault.step is None else f' {fault.step}'}"
        named = each.how if each.rank is None else f"rank {each.rank} {each.how}"
        cells = (number, name, where, _seconds(each.detected), _seconds(each.recovered), each.lost, named, each.code)
        lines.append("| " + " | ".join("-" if cell is None else str(cell) for cell in cells) + " |")
    return lines


def summary(faults: Sequence[Planned], found: Sequence[Recovery], seconds: float) -> str:
    """How many faults of how many kinds there were, and what they took."""
    names = _names(faults)
    kinds = {names[each.number][0] for each in found}
    detected = sorted(each.detected for each in found if each.detected is not None)
    recovered = sorted(each.recovered for each in found if each.recovered is not None)
    lost = sum(each.lost for each in found if each.lost is not None)
    return (
        f"{len(found)} faults of {len(kinds)} kinds in {seconds / 60:.1f} minutes; detected and all ended after "
        f"{_middle(detected)}, trained again after {_middle(recovered)}; {lost} steps were trained again."
    )


def _names(faults: Sequence[Planned]) -> list[tuple[str, Fault]]:
    """The faults as they are numbered in the journal, each with its name."""
    return [(each.name, fault) for each in faults for fault in each.faults]


def _middle(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{values[len(values) // 2]:.1f} s (median; at most {values[-1]:.1f} s)"


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f} s"


def say(line: str) -> None:
    """Prints a line of the soak to stderr."""
    print(f"soak: {line}", file=sys.stderr, flush=True)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m support.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="a YAML file or the name of a preset")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values laid over those of the file")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults are injected (10)")
    parser.add_argument("--processes", type=int, default=2, help="processes of the run (2)")
    parser.add_argument("--devices", type=int, default=2, help="simulated devices of each process (2)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (0)")
    parser.add_argument("--every", type=float, default=5.0, help="steps between two faults, on average (5)")
    parser.add_argument("--deadline", type=int, default=10, help="timeouts.step, seconds (10)")
    parser.add_argument("--folder", help="where to keep both runs; a temporary one by default")
    return parser.parse_intermixed_args(words)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
