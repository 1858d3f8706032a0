"""A run from its first attempt to its end: start its processes, see how they end, start them again where that helps."""

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ...configs.schema import Config
from ...mesh.files import absolute_path
from ...mesh.text import printable
from ...training.ending.exits import TRY_AGAIN, USER_MISTAKE
from ..run.directory.folder import check_folder, make_folder
from ..run.directory.ownership import refuse_if_in_use
from .blame import Exit
from .processes import Outcome, run_processes
from .restarts import Restarts
from .summary import summary
from .terminal import SAYS
from .workers import Start


class NotNow(RuntimeError):
    """An attempt cannot be made now, and may be later."""

    exit_code = TRY_AGAIN


class Attempt(NamedTuple):
    """The processes of one attempt.

    Attributes:
        starts: By rank.
        text: What is started where, for people.
        outcome: Says of the ranks what the end of these processes means, where they are not the ranks themselves.
    """

    starts: Sequence[Start]
    text: str
    outcome: Callable[[Outcome], Outcome] = lambda ended: ended


def run_attempts(config: Config, attempt: Callable[[bool], Attempt], *, fresh: bool = False, restarts: int = 0) -> int:
    """Runs the processes of a run, again after a death where `restarts` allows it.

    Args:
        config: Of the run.
        attempt: Gives the processes of the next attempt, with an address of its own; told whether to start anew. It may
            raise NotNow, which counts as an attempt that failed.
        fresh: Start anew; process 0 moves aside what the folder of the run holds, but its logs.
        restarts: How often in a row a run that died starts again by itself without a newer checkpoint.

    Returns:
        The exit code of the process that ended the run: 0 finished, 2 a mistake in the config, 3 diverged, 75 stopped
        by a signal, so try again.

    Raises:
        UserError: The folder of the run cannot be used; no process was started.
        FolderUnavailable: The file system of run.dir cannot be written to.
    """
    logs = Path(config.run.dir) / "logs"
    folder = absolute_path(config.run.dir)
    check_folder(folder)
    refuse_if_in_use(folder)
    missing = [each for each in (logs, folder, *folder.parents) if not each.exists()]
    before = _written(logs.parent)
    make_folder(logs)
    tries = Restarts(logs.parent / "checkpoints", restarts)
    while True:
        try:
            starts, text, read = attempt(fresh)
        except NotNow as error:
            say(str(error))
            outcome = Outcome((Exit(0, TRY_AGAIN),), None, ([str(error)],))
        else:
            say(f"{text}, output in {logs}")
            outcome = read(run_processes(starts, logs, stop=config.timeouts.stop))
            removed = outcome.exit_code == USER_MISTAKE and remove_new(missing, logs, before)
            for line in summary(outcome, None if removed else logs):
                say(line)
        fresh = fresh and _written(logs.parent) == before  # once the new run has the directory, it goes on
        decided = tries.after(outcome)
        if decided.reason:
            say(decided.reason)
        if not decided.again:
            return outcome.exit_code
        time.sleep(decided.seconds)


def remove_new(made: Sequence[Path], logs: Path, before: int | None = None) -> bool:
    """Removes the logs of a mistake, and the folders made for them: a command that cannot work leaves no trace.

    Args:
        made: The folders that were not there before, the innermost first.
        logs: The folder of the logs.
        before: When config.yaml beside them had been written; None = there was none.

    Returns:
        Whether the logs are gone; they stay where there were some before, or the run has started.
    """
    if logs not in made or _written(logs.parent) != before:
        return False
    shutil.rmtree(logs)
    for folder in made[1:]:
        if any(folder.iterdir()):
            break
        folder.rmdir()
    return True


def _written(folder: Path) -> int | None:
    """When the config.yaml of a run was written."""
    try:
        return (folder / "config.yaml").stat().st_mtime_ns
    except OSError:
        return None


def say(line: str) -> None:
    """Prints a line of the launcher to stderr."""
    print(f"{SAYS if not line.startswith('  ') else ''}{printable(line)}", file=sys.stderr, flush=True)
