"""`spmdkit launch CONFIG --on slurm`: a batch job of a Slurm cluster.

The config's section `launch` gives the sizes of the job; run.dir must be on a file system that this machine and all
nodes share. The script is written there and submitted with sbatch. It starts the processes with one srun, and decides
by their exit code if the job is requeued. Slurm reads the lines `#SBATCH` by its own rules, and bash reads the others;
both are quoted here.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ..configs.secret_variables import is_secret, redact, resolve
from ..mesh.errors import UserError, counted
from ..mesh.exit_codes import FINISHED, TRY_AGAIN
from ..mesh.files import absolute_path, write_text
from ..runtime.machine_check import check_directory
from ..runtime.ownership import refuse_if_in_use
from ..runtime.run_directory import make_directory
from .launchers import (
    KEEPS_CONFIG,
    LaunchJob,
    LaunchRequest,
    check_no_size,
    describe_missing_gpus,
    invalid_target,
    render,
)
from .startup.variables import without_job_variables
from .supervision.attempts import NotNow
from .supervision.output import announce

UNAVAILABLE = re.compile(
    r"unable to contact|timed out|connect failure|connection refused|zero bytes|munge|authentication|try again"
    r"|temporarily|in standby|communication",
    re.IGNORECASE,
)
"""Messages of sbatch if the cluster is at fault."""
PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]-]+")
"""Characters without a special meaning for Slurm and bash."""
NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


def parse(given: str) -> str:
    """Returns the name of a partition; "" = the default one.

    Raises:
        UserError: It is not a valid name, or it is the size of a job.
    """
    check_no_size("slurm", given)
    if given and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.,-]*", given):
        raise invalid_target("slurm", given)
    return given


def describe(request: LaunchRequest, partition: str) -> str:
    """Returns the batch script exactly as it would be submitted; prints a warning to stderr if it asks for no GPU."""
    return batch_script(_load(request), partition).rstrip()


def launch(request: LaunchRequest, partition: str) -> int:
    """Writes the script into run.dir and submits it.

    Returns:
        0: Slurm has the job.

    Raises:
        UserError: The config is invalid, Slurm is not installed, or it refuses the job; nothing was submitted.
        NotNow: Slurm does not answer.
    """
    job = _load(request)
    script = batch_script(job, partition)
    if shutil.which("sbatch") is None:
        raise UserError(
            "sbatch is not on PATH: --on slurm submits from a machine with Slurm's commands. Log in to the cluster, or "
            "print the script with --dry-run and submit it there."
        )
    variables = job.launch.environment.items()
    secrets = resolve({name: value for name, value in variables if value is None or is_secret(name)})
    directory = absolute_path(job.run_dir)
    check_directory(directory)
    refuse_if_in_use(directory)
    make_directory(directory / "logs")
    path = directory / "slurm.sh"
    write_text(path, script, mode=0o600 if secrets else None)
    number = submit(path, secrets)
    print(number, flush=True)
    announce(describe_job(number, job, directory))
    return FINISHED


def _load(request: LaunchRequest) -> LaunchJob:
    """Reads the config, and warns if the job of real devices asks for no GPU."""
    job = LaunchJob.load(request)
    slurm = job.launch.slurm
    warning = describe_missing_gpus(job, [*slurm.options, *slurm.srun_options])
    if warning:
        announce(warning)
    return job


def submit(script: Path, secrets: Mapping[str, str] = {}) -> str:
    """Submits a script with sbatch; returns the number of the job.

    Args:
        script: The script.
        secrets: Environment variables in addition to those of the shell; Slurm passes all of them on to the job.

    Raises:
        UserError: Slurm refuses it; the message contains Slurm's reason.
        NotNow: Slurm does not answer.
    """
    ended = subprocess.run(
        ["sbatch", "--parsable", str(script)],
        env=without_job_variables(os.environ) | dict(secrets),
        capture_output=True,
        text=True,
        errors="replace",
    )
    message = "; ".join(line.removeprefix("sbatch: error: ") for line in ended.stderr.splitlines() if line.strip())
    if ended.returncode == 0:
        if message:
            announce(f"sbatch: {message}")
        return ended.stdout.strip().split("\n")[-1].partition(";")[0]
    if UNAVAILABLE.search(message):
        raise NotNow(f"Slurm cannot take the job now: {message}. Run the same command again later.")
    raise UserError(
        f"Slurm refuses the job: {message or f'sbatch ended with code {ended.returncode}'}. The request is in "
        f"{script}; it comes from --on slurm:PARTITION and the config's section launch. Correct it there. "
        "Nothing was submitted."
    )


def describe_job(number: str, job: LaunchJob, directory: Path) -> str:
    """Returns the description of a submitted job, with the commands to watch and stop it."""
    logs, sizes = directory / "logs", job.launch
    again = "; then the job is requeued" if sizes.slurm.requeue else ""
    processes = counted(sizes.num_processes, "process", "processes")
    return f"""job {number}: {counted(sizes.nodes, "node")} x {sizes.processes_per_node} = {processes}
  script  {directory / "slurm.sh"}
  logs    {logs}/slurm-{number}.log, and rank-0.log for each rank
  watch   squeue --jobs={number}; tail -F {logs}/rank-0.log
  stop    scancel {number}                  saves, if that takes less than the cluster's KillWait
          scancel --signal=TERM {number}    saves{again}"""


def batch_script(job: LaunchJob, partition: str) -> str:
    """Returns the batch script.

    Args:
        job: The run to launch.
        partition: The partition; "" = the default one.
    """
    launch, directory = job.launch, absolute_path(job.run_dir)
    logs = directory / "logs"
    job = job.with_copy(directory)
    assert job.copy is not None
    variables = redact({"PYTHONUNBUFFERED": "1", **launch.environment}).items()
    options = [
        "--kill-on-bad-exit=1",
        # srun waits for every task, but is not told the end of one if its step daemon was killed.
        f"--wait={job.timeouts.shutdown}",
        "--mpi=none",
        "--open-mode=append",
        *_option("--cpus-per-task", launch.cpus_per_process),  # srun does not inherit it from sbatch
        *launch.slurm.srun_options,
    ]
    command = [*launch.prefix, *job.command(launch.python or sys.executable, fresh=False)]
    return render(
        "slurm.sh",
        logs=shlex.quote(str(logs)),
        directives=[quote_directive(option) for option in _job_options(job, partition, directory)],
        variables={name: None if value is None else shlex.quote(value) for name, value in variables},
        setup=launch.setup,
        run=shlex.quote(str(directory)),
        copy=shlex.quote(job.copy.path),
        config=job.copy.text,
        end=f"END_OF_CONFIG_{job.copy.digest}",
        source=shlex.quote(str(absolute_path(job.request.source))) if job.digest else "",
        digest=job.digest,
        changed=shlex.quote(KEEPS_CONFIG.format(job.copy.path)),
        again=TRY_AGAIN,
        fresh=job.request.fresh,
        options=shlex.join(options),
        output=shlex.quote(f"{escape_pattern(logs)}/rank-%t.log"),
        command=shlex.join(command),
        requeue=launch.slurm.requeue,
        restarts=job.request.restarts or launch.slurm.restarts,
    )


def _job_options(job: LaunchJob, partition: str, directory: Path) -> list[str]:
    """Returns the options of sbatch; those of `launch.slurm.options` are last and take precedence."""
    launch, slurm = job.launch, job.launch.slurm
    return [
        f"--job-name={NOT_IN_A_NAME.sub('-', directory.name).strip('-') or 'spmdkit'}",
        f"--nodes={launch.nodes}",
        f"--ntasks={launch.num_processes}",
        f"--ntasks-per-node={launch.processes_per_node}",
        *_option("--cpus-per-task", launch.cpus_per_process),
        *_option("--gpus-per-task", launch.gpus_per_process),
        *_option("--time", launch.time),
        *_option("--partition", partition),
        *_option("--account", slurm.account),
        *_option("--qos", slurm.qos),
        *([f"--signal=USR1@{slurm.warn_seconds}"] if slurm.warn_seconds else []),
        "--requeue" if slurm.requeue else "--no-requeue",
        "--open-mode=append",
        f"--chdir={Path.cwd()}",
        f"--output={escape_pattern(directory)}/logs/slurm-%j.log",
        *slurm.options,
    ]


def _option(name: str, value: str | int) -> list[str]:
    return [f"{name}={value}"] if value else []


def quote_directive(option: str) -> str:
    """Returns an option quoted for a line `#SBATCH`."""
    if PLAIN.fullmatch(option):
        return option
    escaped = re.sub(r'(["\\#])', r"\\\1", option)
    return f'"{escaped}"'


def escape_pattern(path: Path) -> str:
    """Returns a path for Slurm's options of file names, in which % begins a field."""
    return str(path).replace("%", "%%")
