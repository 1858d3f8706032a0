"""`spmdkit launch CONFIG --on local:2x4`: a run of several processes on this machine, over real collectives."""

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..configs import load_config
from ..training.exits import USER_MISTAKE
from ..training.worker import Job, job_environment
from .folder import check_folder, make_folder
from .ownership import refuse_if_in_use
from .ports import free_port
from .processes import run_processes
from .restarts import Restarts
from .summary import summary
from .target import LocalTarget


def launch(
    source: str, overrides: Sequence[str], target: LocalTarget, *, fresh: bool = False, restarts: int = 0
) -> int:
    """Trains in several processes; the numbers are those of one process with as many devices.

    Args:
        source: A YAML file or the name of a preset.
        overrides: `key=value` each.
        target: How many processes, and how many devices each of them simulates.
        fresh: Start anew; process 0 moves aside what the folder of the run holds, but its logs.
        restarts: How often in a row a run that died starts again by itself without a newer checkpoint.

    Returns:
        The exit code of the process that ended the run: 0 finished, 2 a mistake in the config, 3 diverged, 75 stopped
        by a signal, so try again.

    Raises:
        UserError: The config or the folder of the run cannot be used; no process was started.
        FolderUnavailable: The file system of run.dir cannot be written to.
    """
    config = load_config(source, overrides, num_processes=target.num_processes, simulate=target.devices)
    logs = Path(config.run.dir) / "logs"
    check_folder(logs.parent.absolute())
    refuse_if_in_use(logs.parent.absolute())
    missing = [each for each in (logs, *logs.absolute().parents) if not each.exists()]
    make_folder(logs)
    command = [sys.executable, "-P", "-m", "spmdkit", "train", source, *overrides]
    tries = Restarts(logs.parent / "checkpoints", restarts)
    while True:
        address = f"127.0.0.1:{free_port()}"  # a fresh one for every attempt
        _say(
            f"{target.num_processes} processes x {target.devices} simulated devices = "
            f"{target.num_processes * target.devices} devices, coordinator {address}, output in {logs}"
        )
        environments = [worker_environment(address, target, rank) for rank in range(target.num_processes)]
        outcome = run_processes(
            [*command, *(["--fresh"] if fresh else [])], environments, logs, stop=config.timeouts.stop
        )
        removed = outcome.exit_code == USER_MISTAKE and remove_new(missing, logs)
        for line in summary(outcome, None if removed else logs):
            _say(line)
        fresh = fresh and not (logs.parent / "checkpoints").exists()
        decided = tries.after(outcome)
        if decided.reason:
            _say(decided.reason)
        if not decided.again:
            return outcome.exit_code
        time.sleep(decided.seconds)


def remove_new(made: Sequence[Path], logs: Path) -> bool:
    """Removes the logs of a mistake, and the folders made for them: a command that cannot work leaves no trace.

    Args:
        made: The folders that were not there before, the innermost first.
        logs: The folder of the logs.

    Returns:
        Whether the logs are gone; they stay where there were some before, or the run has started.
    """
    if logs not in made or (logs.parent / "config.yaml").exists():
        return False
    shutil.rmtree(logs)
    for folder in made[1:]:
        if any(folder.iterdir()):
            break
        folder.rmdir()
    return True


def worker_environment(address: str, target: LocalTarget, rank: int) -> dict[str, str]:
    """Returns the environment of one process of the run.

    Its coordinator is on this machine, so no proxy may stand between them. What it prints comes at once.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("KERAS_DISTRIBUTION_")}
    if any(key.lower().endswith("_proxy") for key in environment):
        direct = ",".join(filter(None, (environment.get("no_proxy") or environment.get("NO_PROXY"), "127.0.0.1")))
        environment |= {"no_proxy": direct, "NO_PROXY": direct}
    job = Job(address, target.num_processes, rank, target.devices)
    return environment | job_environment(job) | {"PYTHONUNBUFFERED": "1"}


def _say(line: str) -> None:
    print(f"spmdkit launch: {line}" if not line.startswith("  ") else line, file=sys.stderr, flush=True)
