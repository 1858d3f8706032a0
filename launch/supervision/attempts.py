"""Runs the attempts of a run: starts its processes, and starts them again if that can help.

Progress is a newer checkpoint. A run that dies after progress is restarted at once; otherwise after increasing delays,
and only a limited number of times in a row.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ...mesh.errors import TryAgain
from ...mesh.exit_codes import INVALID_INPUT, TRY_AGAIN
from ...mesh.files import absolute_path
from ...runtime.machine_check import check_directory, explain_unusable
from ...runtime.ownership import refuse_if_in_use
from ...runtime.run_directory import make_directory
from ..launchers import LaunchJob
from .blame import Exit, Outcome, summarize
from .output import announce
from .workers import Start, run_processes

MAX_WAIT_SECONDS = 60.0


class NotNow(TryAgain):
    """A run cannot start now, because a host or a cluster does not answer; the same command may work later."""


class Attempt(NamedTuple):
    """The processes of one attempt.

    Attributes:
        starts: The processes by rank.
        text: A description for people.
        outcome: Converts the outcome of these processes to that of the ranks, if they are not the ranks themselves.
    """

    starts: Sequence[Start]
    text: str
    outcome: Callable[[Outcome], Outcome] = lambda ended: ended


def run_attempts(job: LaunchJob, attempt: Callable[[bool], Attempt]) -> int:
    """Runs the processes of a run, and restarts them after a failure as often as the request allows it.

    Args:
        job: The run to launch.
        attempt: Returns the processes of the next attempt, with a new coordinator address; its argument is `fresh`. It
            may raise NotNow, which counts as a failed attempt.

    Returns:
        The exit code of the process that ended the run: 0 finished, 2 a mistake in the config, 3 diverged, 75 stopped
        by a signal, so try again.

    Raises:
        UserError: The directory of the run cannot be used; no process was started.
        DirectoryUnavailable: The file system of run.dir cannot be written.
    """
    logs, fresh = Path(job.run_dir) / "logs", job.request.fresh
    directory = absolute_path(job.run_dir)
    check_directory(directory)
    refuse_if_in_use(directory)
    created = [each for each in (logs, directory, *directory.parents) if not each.exists()]
    config_time = _read_config_time(logs.parent)
    policy = Restarts(logs.parent / "checkpoints", job.request.restarts)
    is_restart = False
    while True:
        if is_restart and (change := job.describe_change()):
            announce(change)
        try:
            starts, text, read = attempt(fresh)
        except NotNow as error:
            announce(str(error))
            outcome = Outcome((Exit(0, TRY_AGAIN),), None, ([str(error)],))
        else:
            make_directory(logs)
            write_copy(job)
            announce(f"{text}, output in {logs}")
            outcome = read(run_processes(starts, logs, stop=job.timeouts.stop))
            was_removed = outcome.exit_code == INVALID_INPUT and remove_created(created, logs, config_time)
            for line in summarize(outcome, None if was_removed else logs):
                announce(line)
        fresh = fresh and _read_config_time(logs.parent) == config_time  # once the new run owns the directory, resume
        delay, reason = policy.decide(outcome)
        if reason:
            announce(reason)
        if delay is None:
            return outcome.exit_code
        time.sleep(delay)
        is_restart = True


def write_copy(job: LaunchJob) -> None:
    """Writes the config that the processes of a launch read, if it is a copy.

    Raises:
        UserError: The file cannot be written.
        DirectoryUnavailable: The file system of run.dir cannot be written.
    """
    if job.copy is None:
        return
    make_directory(Path(job.copy.path).parent)
    try:
        job.copy.write()
    except OSError as error:
        raise explain_unusable(absolute_path(job.run_dir), error) from error


def remove_created(created: Sequence[Path], logs: Path, config_time: int | None = None) -> bool:
    """Removes the logs and directories of a run that could not start: a mistake leaves no trace.

    Args:
        created: The directories that did not exist before, the innermost first.
        logs: The directory of the logs.
        config_time: The modification time of the run's config.yaml before; None if it did not exist.

    Returns:
        Whether the logs were removed; they stay if there were some before, or the run has started.
    """
    if logs not in created or _read_config_time(logs.parent) != config_time:
        return False
    shutil.rmtree(logs)
    for directory in created[1:]:
        if any(directory.iterdir()):
            break
        directory.rmdir()
    return True


def _read_config_time(run_dir: Path) -> int | None:
    try:
        return (run_dir / "config.yaml").stat().st_mtime_ns
    except OSError:
        return None


class Restarts:
    """Decides after each attempt of a run if another follows.

    Args:
        checkpoints: The run's directory of checkpoints.
        max_in_vain: The maximum number of restarts in a row without a newer checkpoint; 0 = no restarts.
    """

    def __init__(self, checkpoints: Path, max_in_vain: int) -> None:
        self._checkpoints = checkpoints
        self._max = max_in_vain
        self._latest = find_latest_step(checkpoints)
        self._in_vain = 0

    def decide(self, outcome: Outcome) -> tuple[float | None, str]:
        """Decides after an attempt: only exit code 75 leads to another, unless a signal ended the launcher.

        Returns:
            The seconds before the next attempt, or None if there is none; and a line for people, or "".
        """
        if self._max == 0 or outcome.exit_code != TRY_AGAIN or outcome.signal is not None:
            return None, ""
        latest = find_latest_step(self._checkpoints)
        self._in_vain = 0 if latest > self._latest else self._in_vain + 1
        self._latest = latest  # lower than before if a corrupt checkpoint was set aside
        if self._in_vain > self._max:
            return None, f"not restarted: {self._max} restarts made no newer checkpoint"
        start = f"from step {latest}" if latest else "from the beginning"
        if not self._in_vain:
            return 0.0, f"restarting {start}"
        seconds = min(2.0 ** (self._in_vain - 1), MAX_WAIT_SECONDS)
        count = f"restart {self._in_vain} of {self._max} without a newer checkpoint"
        return seconds, f"restarting in {seconds:.0f} s {start}, {count}"


def find_latest_step(checkpoints: Path) -> int:
    """Returns the latest step that has a checkpoint; 0 if there is none."""
    names = [each.name for each in checkpoints.iterdir()] if checkpoints.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=0)
