"""`spmdkit launch CONFIG --on slurm`: a run as a batch job of a Slurm cluster.

The sizes of the job come from the config's section `launch`; run.dir has to be on a file system that this machine and
all nodes share. The script is kept there, and handed to sbatch. To place, start and requeue is Slurm's work.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..configs import load_config
from ..configs.schema import Config
from ..configs.secret_variables import is_secret, resolve
from ..mesh.errors import UserError
from ..mesh.files import absolute_path
from ..mesh.joining.sources import without_job
from ..training.ending.exits import FINISHED, TRY_AGAIN
from .places import Run, not_a_target
from .run.directory.folder import check_folder, make_folder
from .run.directory.ownership import refuse_if_in_use
from .slurm_script import batch_script

SUBMIT_SECONDS = 120.0
POLL_SECONDS = 1.0, 15.0
"""Between two questions how a job is, at first and at last."""
PATIENCE = 20
"""How often in a row Slurm may fail to answer while a job is waited for."""
UNAVAILABLE = re.compile(
    r"unable to contact|timed out|connect failure|connection refused|zero bytes|munge|authentication|try again"
    r"|temporarily|in standby|communication",
    re.IGNORECASE,
)
"""What sbatch says where the cluster is at fault."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL")
ENDED += ("DEADLINE", "REVOKED")


class SlurmTarget(NamedTuple):
    """A Slurm cluster.

    Attributes:
        partition: Its partition; empty = the default one.
    """

    partition: str


class ClusterUnavailable(RuntimeError):
    """Slurm does not answer; the same command may work when it does."""

    exit_code = TRY_AGAIN


class State(NamedTuple):
    """What Slurm says of a job.

    Attributes:
        name: Such as RUNNING.
        code: Exit code of its script.
    """

    name: str
    code: int

    @property
    def exit_code(self) -> int:
        """What a launch that has waited for the job exits with."""
        if self.name == "COMPLETED":
            return FINISHED
        return self.code if self.name == "FAILED" and 0 < self.code < 128 else TRY_AGAIN


def parse(given: str) -> SlurmTarget:
    """Reads the name of a partition, or nothing.

    Raises:
        UserError: It can be none.
    """
    if given and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.,-]*", given):
        raise not_a_target("slurm", given)
    return SlurmTarget(given)


def describe(run: Run, target: SlurmTarget) -> str:
    """The batch script, exactly as it would be submitted."""
    return batch_script(run, load_config(run.source, run.overrides, num_processes=None), target.partition).rstrip()


def launch(run: Run, target: SlurmTarget) -> int:
    """Writes the script into run.dir and submits it.

    Returns:
        0 once Slurm has the job; where `run.wait`, the exit code of the job when it has ended.

    Raises:
        UserError: The config cannot work, there is no Slurm here, or it refuses the job; nothing was submitted.
        ClusterUnavailable: Slurm does not answer.
    """
    config = load_config(run.source, run.overrides, num_processes=None)
    script = batch_script(run, config, target.partition)
    if shutil.which("sbatch") is None:
        raise UserError(
            "There is no sbatch on PATH: --on slurm submits from a machine that has Slurm's commands. Log in to the "
            "cluster, or print the script with --dry-run and submit it there."
        )
    by_name = {name: value for name, value in config.launch.environment.items() if value is None or is_secret(name)}
    given = resolve(by_name)
    folder = absolute_path(config.run.dir)
    check_folder(folder)
    refuse_if_in_use(folder)
    make_folder(folder / "logs")
    path = folder / "slurm.sh"
    path.write_text(script, encoding="utf-8")
    if given:
        path.chmod(0o600)
    job = submit(path, given)
    print(job, flush=True)
    say(told(job, config, folder))
    return wait_for(job, folder) if run.wait else FINISHED


def submit(script: Path, given: Mapping[str, str] = {}) -> str:
    """Hands a script to sbatch; returns the number of the job.

    Args:
        script: The script.
        given: Environment variables beside those of the shell; Slurm passes all of them on to the job.

    Raises:
        UserError: Slurm refuses it, and says why.
        ClusterUnavailable: Slurm does not answer.
    """
    environment = without_job(os.environ) | dict(given)
    try:
        ended = subprocess.run(
            ["sbatch", "--parsable", str(script)],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SUBMIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise ClusterUnavailable(
            f"sbatch did not end within {SUBMIT_SECONDS:.0f} s. Look with squeue whether it has submitted the job; if "
            "not, start the same command again."
        ) from None
    said = "; ".join(line.removeprefix("sbatch: error: ") for line in ended.stderr.splitlines() if line.strip())
    if ended.returncode == 0:
        if said:
            say(f"sbatch says: {said}")
        return ended.stdout.strip().split("\n")[-1].partition(";")[0]
    if UNAVAILABLE.search(said):
        raise ClusterUnavailable(f"Slurm does not take the job now: {said}. Start the same command again later.")
    raise UserError(
        f"Slurm refuses the job: {said or f'sbatch ended with code {ended.returncode}'}. What it was asked for is in "
        f"{script}, from --on slurm:PARTITION and the config's section launch; correct it there. Nothing was submitted."
    )


def told(job: str, config: Config, folder: Path) -> str:
    """What is said of a job that was submitted."""
    sizes, logs = config.launch, folder / "logs"
    per_node = f"{sizes.nodes} node{'s'[: sizes.nodes > 1]} x {sizes.processes_per_node}"
    again = "; goes back into the queue" if sizes.slurm.requeue else ""
    return f"""job {job}: {per_node} = {sizes.num_processes} process{"es"[: 2 * (sizes.num_processes > 1)]}
  script  {folder / "slurm.sh"}
  logs    {logs}/slurm-{job}.log, and rank-0.log for each rank
  watch   squeue --jobs={job}; tail -F {logs}/rank-0.log
  stop    scancel {job}                  saves, if that takes less than the cluster's KillWait
          scancel --signal=TERM {job}    saves{again}"""


def wait_for(job: str, folder: Path) -> int:
    """Waits for the end of a job, over its restarts; returns the exit code of its last.

    Raises:
        ClusterUnavailable: Slurm has not answered for minutes.
    """
    failures, pause = 0, POLL_SECONDS[0]
    try:
        while True:
            state = ask(job)
            failures = 0 if state else failures + 1
            if failures > PATIENCE:
                raise ClusterUnavailable(f"Slurm no longer says how job {job} is. Look with: squeue --jobs={job}")
            if state and state.name in ENDED:
                break
            time.sleep(pause)
            pause = min(1.1 * pause, POLL_SECONDS[1])
    except KeyboardInterrupt:
        say(f"no longer waiting; job {job} goes on. To stop it: scancel {job}")
        return TRY_AGAIN
    say(f"job {job} ended: {state.name}. Its log, {folder}/logs/slurm-{job}.log, ends:")
    for line in last_start(folder / "logs" / f"slurm-{job}.log"):
        print(f"  {line}", file=sys.stderr, flush=True)
    return state.exit_code


def ask(job: str) -> State | None:
    """Asks Slurm how a job is; None where it does not say."""
    try:
        asked = ["scontrol", "show", "job", "--oneliner", job]
        ended = subprocess.run(asked, capture_output=True, text=True, errors="replace", timeout=SUBMIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    name = re.search(r"\bJobState=(\w+)", ended.stdout)
    code = re.search(r"\bExitCode=(\d+):", ended.stdout)
    return State(name[1], int(code[1])) if name and code else None


def last_start(log: Path, most: int = 40) -> list[str]:
    """Returns the lines of a job's log since it started last."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ["(there is none)"]
    begins = [number for number, line in enumerate(lines) if line.startswith("--- ")]
    return lines[max(begins, default=0) :][-most:]


def say(line: str) -> None:
    """Prints a line of the launcher to stderr."""
    print(f"spmdkit launch: {line}", file=sys.stderr, flush=True)
