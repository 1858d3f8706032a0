"""`spmdkit launch CONFIG --on mpi`: Open MPI's mpirun, on this machine or on the hosts of a hostfile.

mpirun starts the processes, and ends all of them if one fails. It is supervised here like one of our own processes.
Signals that would make mpirun kill its processes after one second are replaced by SIGUSR1, which it passes on.
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

from ..configs.secret_variables import resolve
from ..mesh.errors import UserError, counted
from ..mesh.exit_codes import FINISHED
from ..mesh.known_causes import RELAYED
from .launchers import LaunchJob, LaunchRequest, check_no_size, invalid_target, shell_line
from .startup.variables import without_job_variables
from .supervision.attempts import Attempt, NotNow, run_attempts
from .supervision.blame import Exit, Outcome
from .supervision.lifetime import BOUND_VARIABLE, PARENT_ONLY, bound_to
from .supervision.output import TaggedOutput
from .supervision.workers import Start, free_port

FORWARDED = ("SPMDKIT_", "JAX_", "XLA_", "NCCL_", "TF_CPP_", "PYTHON")
"""Prefixes of the variables that processes on other hosts get too."""
SIGNALS: Mapping[signal.Signals, signal.Signals] = dict.fromkeys(
    (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.SIGUSR1
)
OUTPUT = {"PYTHONUNBUFFERED": "1", "TERM": "dumb"}
"""mpirun gives its processes terminals of their own, although their output goes to files."""
EXITED = re.compile(r"Process name: \[.*,(\d+)\]")
CODE = re.compile(r"Exit code:\s+(\d+)")
KILLED = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)")
MISTAKE = re.compile(r"not enough slots|could not access\s+or execute|unrecognized|unknown option|not found", re.DOTALL)
"""Messages of mpirun for which another attempt would fail in the same way."""


def parse(given: str) -> str:
    """Returns the path of a hostfile; "" = this machine, or the hosts of the allocation around this command.

    Raises:
        UserError: The file does not exist, or it is the size of a job.
    """
    if given and not Path(given).is_file():
        check_no_size("mpi", given)
        is_number = re.fullmatch(r"[0-9]{1,4}", given)
        hint = f" (for {given} processes: --on mpi launch.processes_per_node={given})" if is_number else ""
        raise invalid_target("mpi", given, f": missing file {given[:60]!r}{hint}")
    return given


def describe(request: LaunchRequest, hostfile: str) -> str:
    """Returns the command line of mpirun; PORT stands for a free port, chosen anew for every attempt."""
    job = _load(request, hostfile)
    coordinator = find_coordinator(job.launch.nodes, hostfile, "PORT")
    variables = _variables(job.launch.environment, coordinator, PARENT_ONLY)
    return shell_line(_mpirun(job, hostfile, without_job_variables(os.environ) | variables, request.fresh), variables)


def launch(request: LaunchRequest, hostfile: str) -> int:
    """Trains in the processes that mpirun starts.

    Returns:
        The exit code of the process that ended the run: 0 finished, 2 a mistake in the config, 3 diverged, 75 stopped
        by a signal, so try again.

    Raises:
        UserError: The config is invalid, or Open MPI is not installed.
        NotNow: It could not start the processes.
    """
    job = _load(request, hostfile).with_copy()
    count = job.launch.num_processes
    check_open_mpi()
    resolve(job.launch.environment)

    def attempt(fresh: bool) -> Attempt:
        coordinator = find_coordinator(job.launch.nodes, hostfile, str(free_port()))
        variables = _variables(job.launch.environment, coordinator, bound_to(os.getpid()))
        environment = without_job_variables(os.environ) | resolve(variables) | RELAYED
        output = TaggedOutput(Path(job.run_dir) / "logs", count, "mpirun")
        text = f"mpirun with {counted(count, 'process', 'processes')}"
        text += f", coordinator {coordinator}" if coordinator else ""
        command = _mpirun(job, hostfile, environment, fresh)
        start = Start(command, environment, signals=SIGNALS, relay=output, is_rank=False)
        return Attempt([start], text, lambda ended: find_outcome(ended, output))

    return run_attempts(job, attempt)


def _load(request: LaunchRequest, hostfile: str) -> LaunchJob:
    job = LaunchJob.load(request)
    if hostfile and (found := len(read_hostfile(hostfile))) < job.launch.nodes:
        raise UserError(
            f"launch.nodes={job.launch.nodes} hosts, but {hostfile} lists {found}. Add the missing hosts, one "
            "per line, or set launch.nodes."
        )
    return job


def check_open_mpi() -> None:
    """Checks that mpirun is installed and belongs to Open MPI.

    Raises:
        UserError: It is missing, or belongs to another MPI.
    """
    if shutil.which("mpirun") is None:
        raise UserError(
            "mpirun is not on PATH: --on mpi needs Open MPI (module load openmpi; Debian: apt-get install openmpi-bin)."
            " On this machine alone, use --on local:PxD."
        )
    output = subprocess.run(
        ["mpirun", "--version"], capture_output=True, text=True, errors="replace", timeout=60
    ).stdout
    if not re.search(r"Open MPI|OpenRTE|PRRTE", output):
        raise UserError(
            f"mpirun is not Open MPI's, but {output.strip().split(chr(10))[0][:80]!r}. Start the processes with it "
            "yourself: `mpirun -n 4 spmdkit train CONFIG`; they find each other by their PMI variables."
        )


def _mpirun(job: LaunchJob, hostfile: str, environment: Mapping[str, str | None], fresh: bool) -> list[str]:
    """Returns the command line of mpirun, after the lines of `launch.setup`.

    Args:
        job: The run to launch.
        hostfile: The file with the hosts, or "".
        environment: The environment of mpirun; variables that other hosts need are passed by name.
        fresh: Start from step 0.
    """
    sizes = job.launch
    names = sorted(name for name in environment if name in (*sizes.environment, "TERM") or name.startswith(FORWARDED))
    command = [
        *("mpirun", "-n", str(sizes.num_processes), "--tag-output"),
        *("--bind-to", "none", "--oversubscribe"),  # a process has many threads; the sizes above set their number
        *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
        *(["--hostfile", hostfile] if hostfile else []),
        *("--map-by", f"ppr:{sizes.processes_per_node}:node"),
        *(word for name in names for word in ("-x", name)),
        *sizes.mpi.options,
        *sizes.prefix,
        *job.command(sizes.python or sys.executable, fresh=fresh),
    ]
    return job.run_setup(command)


def _variables(own: Mapping[str, str | None], coordinator: str, bound: str) -> dict[str, str | None]:
    """Returns the additional variables of mpirun; it sets rank and count itself.

    Args:
        own: The variables of `launch.environment`.
        coordinator: The address of process 0, or "".
        bound: The value of BOUND_VARIABLE.
    """
    given = {"SPMDKIT_JOB_ADDRESSES": coordinator} if coordinator else {}
    return {**given, **OUTPUT, BOUND_VARIABLE: bound, **own}


def find_coordinator(nodes: int, hostfile: str, port: str) -> str:
    """Returns the address of process 0, on the first host; "" if the processes find it themselves.

    Raises:
        UserError: Several hosts are needed, but they are not known.
    """
    if nodes == 1 and not hostfile:
        return f"127.0.0.1:{port}"
    if not hostfile and os.environ.get("SLURM_JOB_NODELIST"):
        return ""
    file = hostfile or os.environ.get("PBS_NODEFILE", "")
    if not file:
        raise UserError(
            f"launch.nodes={nodes}, but the hosts are not known. Write them to a file, one per line, and use "
            "--on mpi:HOSTFILE."
        )
    hosts, name = list(dict.fromkeys(read_hostfile(file)))[:nodes], socket.gethostname()
    own = ("localhost", "::1", name, name.partition(".")[0])
    is_here = [host in own or host.startswith("127.") for host in hosts]
    if all(is_here):
        return f"127.0.0.1:{port}"  # JAX does not authenticate who connects to the coordinator
    return f"{name if is_here[0] else hosts[0]}:{port}"


def read_hostfile(hostfile: str) -> list[str]:
    """Returns the hosts of a hostfile: the first word of each line that is not a comment.

    Raises:
        UserError: It is empty, or cannot be read.
    """
    try:
        lines = Path(hostfile).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The hostfile {hostfile} cannot be read: {error}") from error
    words = [line.partition("#")[0].split() for line in lines]
    hosts = [each[0] for each in words if each]
    if not hosts:
        raise UserError(f"The hostfile {hostfile} is empty. Write one host per line, such as: node1 slots=4")
    return hosts


def find_outcome(ended: Outcome, output: TaggedOutput) -> Outcome:
    """Converts the outcome of mpirun to that of the ranks.

    Args:
        ended: The outcome of mpirun.
        output: The output of mpirun and the ranks.

    Raises:
        UserError: mpirun could not start the processes because of a mistake.
        NotNow: mpirun failed for another reason.
    """
    (mpirun,) = ended.exits or (Exit(0, -signal.SIGKILL, stopped=True),)
    failed = find_first_failure(list(output.own))
    if failed is None and mpirun.code != FINISHED and not mpirun.stopped:
        message = "\n  ".join(output.own) or "It printed nothing."
        if MISTAKE.search(message):
            raise UserError(f"mpirun could not start the processes (code {mpirun.code}):\n  {message}")
        raise NotNow(f"mpirun itself failed (code {mpirun.code}), not a process of the run:\n  {message}")
    rank, code = failed or (0, mpirun.code)
    return ended._replace(exits=(Exit(rank, code, mpirun.stopped),), tails=output.tails)


def find_first_failure(lines: Sequence[str]) -> tuple[int, int] | None:
    """Returns rank and exit code (negative for a signal) of the first process that failed, according to mpirun."""
    text = "\n".join(lines)
    if killed := KILLED.search(text):
        return int(killed[1]), -int(killed[2])
    exited, code = EXITED.search(text), CODE.search(text)
    return (int(exited[1]), int(code[1])) if exited and code else None
