"""One run of a sweep, trained in its process: JAX begins anew, with as many devices as its mesh has."""

import os
import sys
from functools import partial
from pathlib import Path
from signal import Signals
from typing import NamedTuple

from ...mesh.joining.sources import without_job
from ...training.ending.exits import FINISHED
from ..supervision.blame import ending
from ..supervision.bound import VARIABLE as BOUND
from ..supervision.output import last_words, log_file, relay
from ..supervision.processes import Outcome, Start, run_processes
from .planning import Asked, SweptRun

LAUNCHER_SECONDS = 5.0
"""What a launcher may take, to end, beyond what its processes may."""


class Trained(NamedTuple):
    """How a run has ended.

    Attributes:
        exit_code: Of its process; 75 where a signal has killed it.
        reason: Why it has not finished, and where its output is; "" where it has.
        signal: The signal that this process was told to end with meanwhile; None where it was not.
    """

    exit_code: int
    reason: str = ""
    signal: Signals | None = None


def train_apart(asked: Asked, run: SweptRun, place: str) -> Trained:
    """Trains a run from its start, or from its newest checkpoint, to its end. To be called in the main thread.

    What it prints comes out here, and is kept in the folder `logs` of the run. Signals that end this process go to it:
    it saves, and ends.

    Args:
        asked: What the sweep is asked for.
        run: Which one; it has a config.
        place: What stands before each of its lines, such as "2/3".
    """
    assert run.config is not None
    logs, stop = Path(run.config.run.dir) / "logs", run.config.timeouts.stop
    if asked.on:
        logs, stop = logs / "launch", stop + LAUNCHER_SECONDS
    start = Start(command(asked, run), environment(), relay=partial(relay, name=place))
    outcome = run_processes([start], logs, stop=stop)
    if outcome.exits and outcome.exits[0].code == FINISHED:
        return Trained(FINISHED, signal=outcome.signal)
    return Trained(outcome.exit_code, _reason(outcome, log_file(logs, 0)), outcome.signal)


def command(asked: Asked, run: SweptRun) -> list[str]:
    """What the process of a run executes: `spmdkit train`, or `spmdkit launch` where it is to be several."""
    words = ["launch", "--on", str(asked.on)] if asked.on else ["train"]
    fresh = ["--fresh"] if asked.fresh else []
    return [sys.executable, "-P", "-m", "spmdkit", *words, asked.source, *run.overrides, *fresh]


def environment() -> dict[str, str]:
    """The environment of that process: it is no part of a job, prints at once, and does not outlive this one."""
    return without_job(os.environ) | {"PYTHONUNBUFFERED": "1", BOUND: str(os.getpid())}


def _reason(outcome: Outcome, log: Path) -> str:
    """Why a run has not finished, in one line."""
    if outcome.signal is not None:
        return f"stopped by {outcome.signal.name}"
    how = ending(outcome.exits[0].code) if outcome.exits else "it does not end"
    errors = [line.strip() for line in last_words(outcome.tails[0]) if line.strip().startswith("error: ")]
    return f"{how}{f', {errors[-1]}' if errors else ''}; its output is in {log}"
