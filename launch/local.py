"""`spmdkit launch CONFIG --on local:2x4`: a run of several processes on this machine, over real collectives."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..configs import load_config
from ..training.worker import Job, job_environment
from .folder import make_folder
from .ports import free_port
from .processes import run_processes
from .summary import summary
from .target import LocalTarget


def launch(source: str, overrides: Sequence[str], target: LocalTarget) -> int:
    """Trains in several processes; the numbers are those of one process with as many devices.

    Args:
        source: A YAML file or the name of a preset.
        overrides: `key=value` each.
        target: How many processes, and how many devices each of them simulates.

    Returns:
        The exit code of the process that ended the run: 0 finished, 2 a mistake in the config, 3 diverged, 75 stopped
        by a signal, so try again.

    Raises:
        UserError: The config cannot be used; no process was started.
    """
    config = load_config(source, overrides, num_processes=target.num_processes, simulate=target.devices)
    logs = Path(config.run.dir) / "logs"
    make_folder(logs)
    address = f"127.0.0.1:{free_port()}"
    _say(
        f"{target.num_processes} processes x {target.devices} simulated devices = "
        f"{target.num_processes * target.devices} devices, coordinator {address}, output in {logs}"
    )
    command = [sys.executable, "-P", "-m", "spmdkit", "train", source, *overrides]
    environments = [worker_environment(address, target, rank) for rank in range(target.num_processes)]
    outcome = run_processes(command, environments, logs)
    for line in summary(outcome, logs):
        _say(line)
    return outcome.exit_code


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
