"""The batch script of a run under Slurm, from the config's section `launch`.

Slurm reads the lines `#SBATCH` by rules of its own, bash the others; both are quoted here. The script asks for nodes,
starts the processes with one srun, and decides by their exit code whether the job goes back into the queue.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ..configs.launching import LaunchConfig
from ..configs.schema import Config
from ..configs.secret_variables import redact
from ..mesh.errors import UserError
from ..mesh.files import absolute_path
from ..mesh.text import is_printable
from ..training.ending.exits import TRY_AGAIN
from .places import Run

PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]-]+")
"""What neither Slurm nor bash reads as anything but itself."""
NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.-]+")

MISSING = """[ -n "${{{name}+set}}" ] || {{
    echo 'launch.environment.{name} must be set in the shell that submits'
    exit 2
}}"""
BODY = r"""
stopped=
trap 'stopped=1' TERM # scancel: the processes get it as well, and save

newest() {{ # the newest step that has a checkpoint
    ls "$run/checkpoints" 2>/dev/null | grep -Ex '[0-9]+' | sort -n | tail -n 1
}}

logs=$run/logs
mkdir -p "$logs" || exit {again}
starts=$logs/slurm-$SLURM_JOB_ID.starts
step=$(newest)
echo "--- $(date '+%F %T') job $SLURM_JOB_ID, start $((${{SLURM_RESTART_COUNT:-0}} + 1))" \
    "on $SLURM_JOB_NODELIST, from step ${{step:-0}}" | tee -a "$starts"
{fresh}said=$logs/slurm-$SLURM_JOB_ID.srun
srun {options} \
    --output={output} \
    {command} 2>"$said"
code=$?
cat "$said" >&2

# The code of srun is mostly that of the processes it then ended; its first line about one says which failed first.
first=$(sed -n 's/^srun: error: .*: tasks\{{0,1\}} \([0-9][^:]*: .*\)/\1/p' "$said" | head -n 1)
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
"""`run` is set before it. The doubled braces are bash's."""

REQUEUE = r"""
[ "$code" -eq {again} ] || exit "$code" # another try would end likewise
if [ -n "$stopped" ]; then
    echo "job $SLURM_JOB_ID was cancelled; the same command goes on"
    exit {again}
fi
step=$(newest)
if [ "$(grep -c ", from step ${{step:-0}}\$" "$starts")" -gt {restarts} ]; then
    echo "not started again: {restarts} restarts made no newer checkpoint than step ${{step:-0}}"
    exit 1
fi
echo "back into the queue, to go on from step ${{step:-0}}"
scontrol requeue "$SLURM_JOB_ID"
exit {again}
"""

NO_REQUEUE = """
exit "$code"
"""

FRESH = r"""# --fresh, until the new run has written its config.yaml
mark=$logs/slurm-$SLURM_JOB_ID.fresh
[ -e "$mark" ] || : >"$mark"
fresh=--fresh
[ "$run/config.yaml" -nt "$mark" ] && fresh=
"""


def batch_script(run: Run, config: Config, partition: str) -> str:
    """Returns the script, ready for sbatch.

    Args:
        run: What is launched.
        config: Its config, loaded.
        partition: Of the cluster; empty = its default.

    Raises:
        UserError: A path cannot be written in it.
    """
    folder = absolute_path(config.run.dir)
    logs = folder / "logs"
    lines = [f"#SBATCH {directive(option)}" for option in job_options(config, partition, folder)]
    head = ["#!/bin/bash", f"# A run of spmdkit; {shlex.quote(str(logs))} has to exist before it is submitted.", *lines]
    before = [
        MISSING.format(name=name) if value is None else f"export {name}={shlex.quote(value)}"
        for name, value in redact(environment(config.launch)).items()
    ]
    restarts = run.restarts or config.launch.slurm.restarts
    body = BODY.format(
        again=TRY_AGAIN,
        fresh=FRESH if run.fresh else "",
        options=shlex.join(step_options(config)),
        output=shlex.quote(f"{pattern(logs)}/rank-%t.log"),
        command=shlex.join(command(run, config.launch)) + (" $fresh" if run.fresh else ""),
    )
    end = REQUEUE.format(again=TRY_AGAIN, restarts=restarts) if config.launch.slurm.requeue else NO_REQUEUE
    return "\n".join([*head, "", *before, *config.launch.setup, "", f"run={shlex.quote(str(folder))}"]) + body + end


def job_options(config: Config, partition: str, folder: Path) -> list[str]:
    """Returns the options of sbatch, one each; those of `launch.slurm.options` last, where they win."""
    launch, slurm = config.launch, config.launch.slurm
    return [
        f"--job-name={NOT_IN_A_NAME.sub('-', folder.name).strip('-') or 'spmdkit'}",
        f"--nodes={launch.nodes}",
        f"--ntasks={launch.num_processes}",
        f"--ntasks-per-node={launch.processes_per_node}",
        *_given("--cpus-per-task", launch.cpus_per_process),
        *_given("--gpus-per-task", launch.gpus_per_process),
        *_given("--time", launch.time),
        *_given("--partition", partition),
        *_given("--account", slurm.account),
        *_given("--qos", slurm.qos),
        *([f"--signal=USR1@{slurm.warn_seconds}"] if slurm.warn_seconds else []),
        "--requeue" if slurm.requeue else "--no-requeue",
        "--open-mode=append",
        f"--chdir={Path.cwd()}",
        f"--output={pattern(folder)}/logs/slurm-%j.log",
        *slurm.options,
    ]


def step_options(config: Config) -> list[str]:
    """Returns the options of srun but for where the output goes.

    srun waits for every task to end. It never learns of the end of one whose step daemon was killed, so it waits for it
    no longer than processes wait for each other.
    """
    launch = config.launch
    return [
        "--kill-on-bad-exit=1",
        f"--wait={config.timeouts.shutdown}",
        "--mpi=none",
        "--open-mode=append",
        *_given("--cpus-per-task", launch.cpus_per_process),  # srun does not take it from sbatch
        *launch.slurm.srun_options,
    ]


def environment(launch: LaunchConfig) -> dict[str, str | None]:
    """Returns the variables that every process gets beside those of the shell that submits."""
    return {"PYTHONUNBUFFERED": "1", **launch.environment}


def command(run: Run, launch: LaunchConfig) -> list[str]:
    """Returns the command line of every process, but for `--fresh`."""
    return [*launch.prefix, launch.python or sys.executable, "-P", "-m", "spmdkit", *run.arguments]


def directive(option: str) -> str:
    """Returns an option as it stands after `#SBATCH`.

    Raises:
        UserError: It has a line break or another control character, which would end the line.
    """
    if not is_printable(option):
        raise UserError(
            f"{option!r} has a control character, and cannot stand in a script of Slurm. Rename the folder."
        )
    if PLAIN.fullmatch(option):
        return option
    escaped = re.sub(r'(["\\#])', r"\\\1", option)
    return f'"{escaped}"'


def pattern(path: Path) -> str:
    """Returns a path as Slurm's options of files have it, in which % begins a field.

    Raises:
        UserError: It holds a backslash, which makes Slurm take the whole path literally.
    """
    if "\\" in str(path):
        raise UserError(f"run.dir={str(path)!r} holds a backslash, which Slurm's file names may not. Set another.")
    return str(path).replace("%", "%%")


def _given(option: str, value: str | int) -> Sequence[str]:
    """An option, where it has a value."""
    return [f"{option}={value}"] if value else []
