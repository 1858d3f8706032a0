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
from spmdkit.mesh.exit_codes import FAILED, FINISHED, INVALID_INPUT, TRY_AGAIN
from support.cluster import cluster
from support.faults import Fault, Journal
from support.runs import same_run

RESTARTS = 8
"""Restarts in a row without a newer checkpoint: faults sometimes come faster than checkpoints."""
ATTEMPT_SECONDS = 900.0
KEEP = 6
"""Checkpoints: two of them may be damaged before a further one is saved."""
SPARED = 3
"""The number of saves at which nothing is damaged: at the third, only the first is certainly complete."""


class Place(NamedTuple):
    """The place of a fault: a rank, a step, and the first steps from there on that are saved and evaluated."""

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
    """The latest checkpoint is damaged, and the process that has it in memory is killed."""

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
    "killed before the directory of a save": _one("kill", "save:folder"),
    "killed while arrays are written": _one("kill", "save:arrays"),
    "killed before the description": _one("kill", "save:metadata"),
    "killed before the commit": _one("kill", "save:commit"),
    "killed again during the restore": _during_recovery,
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
    "pauses for a second": _one("pause", "step", seconds=1.0),
    "NaN in the batch": _one("nan", "batch"),
    "checkpoint with flipped bits": _damaged("flip"),
    "checkpoint with truncated files": _damaged("truncate"),
    "checkpoint without files": _damaged("empty"),
}
"""Name -> the faults that it consists of."""


def plan(seed: int, *, steps: int, processes: int, every: float, save_every: int, eval_every: int) -> list[Fault]:
    """Draws the faults of a run, in the order of their steps; each kind comes once before any comes twice."""
    draw, names, found = random.Random(seed), [], []
    step = float(save_every)
    while True:
        step += max(1.0, draw.expovariate(1 / every))
        if step >= steps:
            return found
        names = names or draw.sample(list(KINDS), len(KINDS))
        number = int(step) + 1
        while names[-1].startswith("checkpoint") and number <= SPARED * save_every:
            names.insert(0, names.pop())  # a complete checkpoint must exist before it
        saved, evaluated = (min(-(-number // each) * each, steps) for each in (save_every, eval_every))
        found += KINDS[names.pop()](Place(draw.randrange(processes), number, saved, evaluated))


HARMLESS = ("pause", "slow")
"""Kinds that do not end an attempt."""
BEFORE_THE_STEP = ("read", "data", "batch", "step")
"""Phases in which the step that they name is not done yet."""


class Recovery(NamedTuple):
    """The outcome of one fault: seconds until all processes ended, and until the next attempt trained."""

    kind: str
    detected: float | None = None
    recovered: float | None = None
    lost: int | None = None
    cause: Any = None

    def __str__(self) -> str:
        if self.detected is None:
            return f"{self.kind}: continued"
        again = "not trained again" if self.recovered is None else f"trained again after {self.recovered:.1f} s"
        return f"{self.kind}: all ended after {self.detected:.1f} s, {again}, {self.lost} steps lost: {self.cause}"


def recoveries(journal: Journal) -> list[Recovery]:
    """Returns the outcomes of the faults of a run, in order; a damaged checkpoint shows in that of the next fault."""
    events = journal.events()
    return [
        _recovery(event, events[number + 1 :])
        for number, event in enumerate(events)
        if event["event"] == "fault" and event["kind"] != "damage"
    ]


def _recovery(event: dict[str, Any], later: Sequence[dict[str, Any]]) -> Recovery:
    ended = next((each for each in later if each["event"] in ("ended", "attempt")), None)
    if event["kind"] in HARMLESS or ended is None or ended["event"] != "ended" or ended["code"] == 0:
        return Recovery(event["kind"])
    again = next((each for each in later[later.index(ended) :] if each["event"] == "training"), None)
    done = (event["step"] or 0) - (event["phase"] in BEFORE_THE_STEP)
    return Recovery(
        event["kind"],
        detected=ended["time"] - event["time"],
        recovered=again["time"] - event["time"] if again else None,
        lost=max(0, done - (again["step"] - 1)) if again else None,
        cause=ended["cause"],
    )


def main(words: Sequence[str] | None = None) -> int:
    """Runs a soak; returns its exit code."""
    given = _arguments(words)
    overrides = [*given.overrides, f"timeouts.step={given.deadline}", f"checkpoint.keep={KEEP}"]
    config = load_config(given.config, overrides, num_processes=given.processes, simulate=given.devices)
    numbers = {"steps": config.train.steps, "processes": given.processes, "every": given.every}
    faults = plan(given.seed, **numbers, save_every=config.checkpoint.every, eval_every=config.eval.every)
    place = Path(given.folder or tempfile.mkdtemp(prefix="spmdkit-soak-")).absolute()
    say(f"{len(faults)} faults in {config.train.steps} steps, in {place}")
    shape: dict[str, Any] = {"processes": given.processes, "devices": given.devices}
    with cluster(given.config, overrides=[*overrides, f"run.dir={place / 'undisturbed'}"], **shape) as run:
        ended = run.wait(ATTEMPT_SECONDS)
        if ended.code != FINISHED:
            say(f"the undisturbed run ended with {ended.code}:\n{ended.stderr[-2000:]}")
            return ended.code
    journal, deadline, code = place / "journal.jsonl", time.monotonic() + given.minutes * 60, TRY_AGAIN
    options = {"overrides": [*overrides, f"run.dir={place / 'disturbed'}"], "restarts": RESTARTS, "journal": journal}
    while code not in (FINISHED, INVALID_INPUT) and time.monotonic() < deadline:
        with cluster(given.config, faults=faults, **options, **shape) as run, suppress(TimeoutError):
            code = run.wait(max(1.0, deadline - time.monotonic())).code
    if code not in (FINISHED, INVALID_INPUT):  # the time is over: no more faults
        with cluster(given.config, **options, **shape) as run:
            code = run.wait(ATTEMPT_SECONDS).code
    found = recoveries(Journal(journal))
    print("\n".join([*map(str, found), f"{len(found)} faults of {len({each.kind for each in found})} kinds"]))
    if code != FINISHED:
        say("the disturbed run did not end by itself")
        return TRY_AGAIN
    problems = same_run(place / "disturbed", place / "undisturbed")
    say("\n".join(problems) if problems else "every loss and every bit of every array is that of the undisturbed run")
    return FAILED if problems else FINISHED


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
    sys.exit(main())
