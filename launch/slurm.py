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
from .launchers import LaunchJob, LaunchRequest, invalid_target
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

MISSING = """[ -n "${{{name}+set}}" ] || {{
    echo 'launch.environment.{name} must be set in the shell that submits'
    exit 2
}}"""
BODY = r"""
stopped=
trap 'stopped=1' TERM # scancel: the processes get the signal too, and save

latest() {{ # the latest step that has a checkpoint
    ls "$run/checkpoints" 2>/dev/null | grep -Ex '[0-9]+' | sort -n | tail -n 1
}}

logs=$run/logs
mkdir -p "$logs" || exit {again}
starts=$logs/slurm-$SLURM_JOB_ID.starts
step=$(latest)
echo "--- $(date '+%F %T') job $SLURM_JOB_ID, start $((${{SLURM_RESTART_COUNT:-0}} + 1))" \
    "on $SLURM_JOB_NODELIST, from step ${{step:-0}}" | tee -a "$starts"
{fresh}messages=$logs/slurm-$SLURM_JOB_ID.srun
srun {options} \
    --output={output} \
    {command} 2>"$messages"
code=$?
cat "$messages" >&2

# The exit code of srun is mostly that of processes that it killed; its first message about one names the first failure.
first=$(sed -n 's/^srun: error: .*: tasks\{{0,1\}} \([0-9][^:]*: .*\)/\1/p' "$messages" | head -n 1)
rank=${{first%%[!0-9]*}}
case $first in
*": Exited with exit code "*) code=${{first##* }} ;;
?*) code={again} ;; # killed by a signal
esac
[ "$code" -gt 128 ] && code={again}
[ "$code" -eq 0 ] && exit 0
if [ -n "$rank" ]; then
    echo "rank $rank ended first: ${{first#*: }}. Its last lines, all of them in $logs/rank-$rank.log:"
    grep -Fv '[Gloo]' "$logs/rank-$rank.log" | tail -n 20
fi
"""
"""The script after the assignment of `run`. Doubled braces are literal."""

REQUEUE = r"""
[ "$code" -eq {again} ] || exit "$code" # another attempt would fail in the same way
if [ -n "$stopped" ]; then
    echo "job $SLURM_JOB_ID was canceled; the same command resumes the run"
    exit {again}
fi
step=$(latest)
if [ "$(grep -c ", from step ${{step:-0}}\$" "$starts")" -gt {restarts} ]; then
    echo "not restarted: {restarts} restarts made no newer checkpoint than step ${{step:-0}}"
    exit 1
fi
echo "requeueing the job, to resume from step ${{step:-0}}"
scontrol requeue "$SLURM_JOB_ID"
exit {again}
"""

NO_REQUEUE = """
exit "$code"
"""

FRESH = r"""# --fresh applies until the new run has written its config.yaml
mark=$logs/slurm-$SLURM_JOB_ID.fresh
[ -e "$mark" ] || : >"$mark"
fresh=--fresh
[ "$run/config.yaml" -nt "$mark" ] && fresh=
"""


def parse(given: str) -> str:
    """Returns the name of a partition; "" = the default one.

    Raises:
        UserError: It is not a valid name.
    """
    if given and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.,-]*", given):
        raise invalid_target("slurm", given)
    return given


def describe(request: LaunchRequest, partition: str) -> str:
    """Returns the batch script exactly as it would be submitted."""
    return batch_script(LaunchJob.load(request), partition).rstrip()


def launch(request: LaunchRequest, partition: str) -> int:
    """Writes the script into run.dir and submits it.

    Returns:
        0: Slurm has the job.

    Raises:
        UserError: The config is invalid, Slurm is not installed, or it refuses the job; nothing was submitted.
        NotNow: Slurm does not answer.
    """
    job = LaunchJob.load(request)
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
    body = BODY.format(
        again=TRY_AGAIN,
        fresh=FRESH if job.request.fresh else "",
        options=shlex.join(options),
        output=shlex.quote(f"{escape_pattern(logs)}/rank-%t.log"),
        command=shlex.join(command) + (" $fresh" if job.request.fresh else ""),
    )
    restarts = job.request.restarts or launch.slurm.restarts
    lines = [
        "#!/bin/bash",
        f"# A run of spmdkit. The directory {shlex.quote(str(logs))} must exist before you submit this.",
        *(f"#SBATCH {quote_directive(option)}" for option in _job_options(job, partition, directory)),
        "",
        *(
            MISSING.format(name=name) if value is None else f"export {name}={shlex.quote(value)}"
            for name, value in variables
        ),
        *launch.setup,
        "",
        f"run={shlex.quote(str(directory))}",
    ]
    end = REQUEUE.format(again=TRY_AGAIN, restarts=restarts) if launch.slurm.requeue else NO_REQUEUE
    return "\n".join(lines) + body + end


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
