"""`spmdkit launch CONFIG --on mpi`: a run under Open MPI's mpirun, on this machine or on the hosts of a file.

mpirun starts the processes and ends all of them when one fails. It is watched here as a process of our own is: it gets
SIGUSR1, which it hands on, in place of the signals on which it would kill its processes a second later.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..configs import load_config
from ..configs.launching import LaunchConfig
from ..configs.schema import Config
from ..configs.secret_variables import resolve
from ..mesh.errors import UserError
from ..mesh.joining.sources import without_job
from ..training.ending.exits import FINISHED, RELAYED, TRY_AGAIN
from .places import Run, not_a_target, shell_line
from .supervision.attempts import Attempt, run_attempts
from .supervision.blame import Exit
from .supervision.bound import VARIABLE as BOUND
from .supervision.by_rank import ByRank
from .supervision.ports import free_port
from .supervision.processes import Outcome
from .supervision.workers import Start

MOST_PROCESSES = 256
FORWARDED = ("SPMDKIT_", "JAX_", "XLA_", "NCCL_", "TF_CPP_", "PYTHON")
"""Beginnings of the variables that processes on other hosts get too."""
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVES: Mapping[signal.Signals, signal.Signals] = dict.fromkeys(ENDS, signal.SIGUSR1)
"""What mpirun gets: on these it ends its processes a second later; SIGUSR1 it hands on."""
OUTPUT = {"PYTHONUNBUFFERED": "1", "TERM": "dumb"}
"""mpirun gives its processes terminals of their own; what they print goes to files all the same."""
EXITED = re.compile(r"Process name: \[.*,(\d+)\]")
CODE = re.compile(r"Exit code:\s+(\d+)")
KILLED = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)")
MISTAKE = re.compile(r"not enough slots|could not access\s+or execute|unrecognized|unknown option|not found", re.DOTALL)
"""What mpirun says where another try would end likewise."""


class MpiTarget(NamedTuple):
    """Where mpirun starts processes.

    Attributes:
        num_processes: How many on this machine; 0 = as many as the section `launch` says.
        hostfile: Names the hosts; empty = this machine, or those of the allocation around this command.
    """

    num_processes: int = 0
    hostfile: str = ""


class MpirunFailed(RuntimeError):
    """mpirun ended badly without a process of the run that did; another time it may not."""

    exit_code = TRY_AGAIN


def parse(given: str) -> MpiTarget:
    """Reads a number of processes, the path of a hostfile, or nothing.

    Raises:
        UserError: The number is 0 or more than a machine can run, or there is no such file.
    """
    if re.fullmatch(r"[0-9]+", given):
        number = int(given[:20])
        if not 1 <= number <= MOST_PROCESSES:
            raise not_a_target("mpi", given, f": one machine runs 1 to {MOST_PROCESSES} processes")
        return MpiTarget(num_processes=number)
    if given and not Path(given).is_file():
        raise not_a_target("mpi", given, f": there is no file {given[:60]!r}")
    return MpiTarget(hostfile=given)


def describe(run: Run, target: MpiTarget) -> str:
    """The command line of mpirun; PORT is a free one, taken anew for every attempt."""
    config = load(run, target)
    variables = own_variables(address(config.launch, target, "PORT"), config.launch)
    return shell_line(mpirun_command(run, config, target, without_job(os.environ) | variables, run.fresh), variables)


def launch(run: Run, target: MpiTarget) -> int:
    """Trains in the processes that mpirun starts.

    Returns:
        The exit code of the process that ended the run: 0 finished, 2 a mistake in the config, 3 diverged, 75 stopped
        by a signal, so try again.

    Raises:
        UserError: The config cannot work, or there is no Open MPI here.
        MpirunFailed: It could not start the processes.
    """
    config = load(run, target)
    count = num_processes(config, target)
    require_open_mpi()
    resolve(config.launch.environment)
    logs = Path(config.run.dir) / "logs"

    def attempt(fresh: bool) -> Attempt:
        variables = resolve(own_variables(address(config.launch, target, str(free_port())), config.launch))
        environment = without_job(os.environ) | variables | RELAYED
        output = ByRank(logs, count, "mpirun")
        command = mpirun_command(run, config, target, environment, fresh)
        where = f"coordinator {variables['SPMDKIT_JOB_ADDRESSES']}" if variables.get("SPMDKIT_JOB_ADDRESSES") else ""
        text = ", ".join(filter(None, [f"mpirun with {count} process{'es'[: 2 * (count > 1)]}", where]))
        start = Start(command, environment, signals=SAVES, relay=output)
        return Attempt([start], text, lambda ended: outcome_of_ranks(ended, output))

    return run_attempts(config, attempt, fresh=run.fresh, restarts=run.restarts)


def load(run: Run, target: MpiTarget) -> Config:
    """Loads the config for as many processes as there will be."""
    config = load_config(run.source, run.overrides, num_processes=target.num_processes or None)
    if target.hostfile and len(hosts_in(target.hostfile)) < config.launch.nodes:
        raise UserError(
            f"launch.nodes={config.launch.nodes} hosts, but {target.hostfile} names "
            f"{len(hosts_in(target.hostfile))}. Name as many, one a line, or set launch.nodes."
        )
    return config


def num_processes(config: Config, target: MpiTarget) -> int:
    """How many processes the run has."""
    return target.num_processes or config.launch.num_processes


def require_open_mpi() -> None:
    """Makes sure that mpirun is there, and is Open MPI's.

    Raises:
        UserError: It is not.
    """
    if shutil.which("mpirun") is None:
        raise UserError(
            "There is no mpirun on PATH: --on mpi needs Open MPI (module load openmpi; Debian: apt-get install "
            "openmpi-bin). On this machine alone, --on local:PxD needs nothing."
        )
    said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, errors="replace", timeout=60).stdout
    if not re.search(r"Open MPI|OpenRTE|PRRTE", said):
        first = said.strip().split("\n")[0][:80]
        raise UserError(
            f"mpirun is not Open MPI's, but says {first!r}. Start the processes with it yourself: `mpirun -n 4 spmdkit "
            "train CONFIG`; they find each other by their PMI variables."
        )


def mpirun_command(
    run: Run, config: Config, target: MpiTarget, environment: Mapping[str, str | None], fresh: bool
) -> list[str]:
    """Returns the command line of mpirun, after the lines of `launch.setup`.

    Args:
        run: What is launched.
        config: Its config.
        target: Where.
        environment: That of mpirun; what other hosts need of it is named to mpirun.
        fresh: Start anew.
    """
    sizes, count = config.launch, num_processes(config, target)
    names = sorted(name for name in environment if name in (*sizes.environment, "TERM") or name.startswith(FORWARDED))
    placed = [] if target.num_processes else ["--map-by", f"ppr:{sizes.processes_per_node}:node"]
    process = [*sizes.prefix, sizes.python or sys.executable, "-P", "-m", "spmdkit", *run.arguments]
    command = [
        *("mpirun", "-n", str(count), "--tag-output"),
        *("--bind-to", "none", "--oversubscribe"),  # a process is many threads; how many processes is said above
        *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
        *(["--hostfile", target.hostfile] if target.hostfile else []),
        *placed,
        *(word for name in names for word in ("-x", name)),
        *sizes.mpi.options,
        *process,
        *(["--fresh"] if fresh else []),
    ]
    return ["bash", "-c", "\n".join([*sizes.setup, 'exec "$@"']), "bash", *command] if sizes.setup else command


def own_variables(coordinator: str, sizes: LaunchConfig) -> dict[str, str | None]:
    """Returns the variables that mpirun gets beside those of this process; rank and count come from mpirun itself."""
    given = {"SPMDKIT_JOB_ADDRESSES": coordinator} if coordinator else {}
    return {**given, **OUTPUT, BOUND: "1", **sizes.environment}


def address(sizes: LaunchConfig, target: MpiTarget, port: str) -> str:
    """Returns where process 0 will listen: on the first host. Empty where the processes find that out themselves.

    Raises:
        UserError: Several hosts are wanted, and nothing says which.
    """
    if target.num_processes or (sizes.nodes == 1 and not target.hostfile):
        return f"127.0.0.1:{port}"
    if not target.hostfile and os.environ.get("SLURM_JOB_NODELIST"):
        return ""
    file = target.hostfile or os.environ.get("PBS_NODEFILE", "")
    if not file:
        raise UserError(
            f"launch.nodes={sizes.nodes}, but nothing says which hosts those are. Give a file that names them, one a "
            "line: --on mpi:HOSTFILE."
        )
    hosts = list(dict.fromkeys(hosts_in(file)))[: sizes.nodes]
    if all(is_this_machine(host) for host in hosts):
        return f"127.0.0.1:{port}"
    return f"{socket.gethostname() if is_this_machine(hosts[0]) else hosts[0]}:{port}"


def hosts_in(hostfile: str) -> list[str]:
    """Returns the hosts that a file names: the first word of each line that is no comment.

    Raises:
        UserError: There are none, or it cannot be read.
    """
    try:
        lines = Path(hostfile).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The hostfile {hostfile} cannot be read: {error}") from error
    words = [line.partition("#")[0].split() for line in lines]
    hosts = [each[0] for each in words if each]
    if not hosts:
        raise UserError(f"The hostfile {hostfile} names no host. Write one a line, such as: node1 slots=4")
    return hosts


def is_this_machine(host: str) -> bool:
    """Tells whether a host's name is plainly that of this machine."""
    name = socket.gethostname()
    return host in ("localhost", "::1", name, name.partition(".")[0]) or host.startswith("127.")


def outcome_of_ranks(ended: Outcome, output: ByRank) -> Outcome:
    """Says of the ranks what the end of mpirun means.

    Args:
        ended: How mpirun ended.
        output: What it and the ranks have said.

    Raises:
        UserError: mpirun could not start the processes, by a mistake.
        MpirunFailed: Or by the machine's fault.
    """
    (mpirun,) = ended.exits or (Exit(0, -signal.SIGKILL, stopped=True),)
    failed = first_to_fail(list(output.own))
    if failed is None and mpirun.code != FINISHED and not mpirun.stopped:
        said = "\n  ".join(output.own) or "It said nothing."
        if MISTAKE.search(said):
            raise UserError(f"mpirun could not start the processes (code {mpirun.code}):\n  {said}")
        raise MpirunFailed(f"mpirun itself failed (code {mpirun.code}), not a process of the run:\n  {said}")
    rank, code = failed or (0, mpirun.code)
    return ended._replace(exits=(Exit(rank, code, mpirun.stopped),), tails=output.tails)


def first_to_fail(lines: Sequence[str]) -> tuple[int, int] | None:
    """Finds which rank ended badly first, as mpirun tells it: its rank and exit code, negative for a signal."""
    text = "\n".join(lines)
    killed = KILLED.search(text)
    if killed:
        return int(killed[1]), -int(killed[2])
    exited, code = EXITED.search(text), CODE.search(text)
    return (int(exited[1]), int(code[1])) if exited and code else None
