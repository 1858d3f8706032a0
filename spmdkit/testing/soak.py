"""`python -m spmdkit.testing.soak CONFIG`: trains under random faults until the run ends by itself.

The run is trained twice: undisturbed, and with a fault every few steps, each of another kind, on a random rank. What a
fault ends starts again, by `--restarts` where the launcher does that, by the same command where it does not (an
exception, a loss that diverged). It ends well where both have the same losses and the same bits in every array.

  python -m spmdkit.testing.soak quickstart --minutes 10 --processes 2 --devices 2 --seed 0

Ends with 0 where the runs are the same, 1 where they are not, 75 where the disturbed one did not come to its end.
"""

# pyright: reportMissingImports=false

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..configs import load_config
from ..mesh.errors import UserError
from ..training.ending.exits import FAILED, FINISHED, TRY_AGAIN, USER_MISTAKE
from .cluster import cluster
from .compare import same_run
from .faults import Fault
from .journal import Journal
from .plans import Planned, plan
from .recovery import Recovery, recoveries

RESTARTS = 8
"""Restarts in a row without a newer checkpoint: faults come faster than checkpoints now and then."""
ATTEMPT_SECONDS = 900.0
"""The longest that the launcher may take without an end."""
KEEP = 6
"""Checkpoints: two of them may be damaged before a further one is saved."""


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
    while code not in (FINISHED, USER_MISTAKE) and time.monotonic() < deadline:
        with cluster(config, faults=injected, **options) as run, suppress(TimeoutError):
            code = run.wait(max(1.0, deadline - time.monotonic())).code
            say(f"ended with code {code}" + ("" if code == FINISHED else "; the same command again"))
    if code not in (FINISHED, USER_MISTAKE):
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
        prog="python -m spmdkit.testing.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
