"""A Slurm of one's own: controller, munge and nodes on 127.0.0.1 in a mount namespace. Needs root."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from spmdkit.launch.supervision.workers import free_port
from support.processes import assert_nothing_left
from support.runs import command, environment

NODES = 4
PATIENCE = 60.0
KILL_WAIT = 20
CONF = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
GresTypes=gpu
ReturnToService=2
JobRequeue=1
KillWait={kill_wait}
SchedulerParameters=sched_interval=2
{nodes}
PartitionName=low Nodes=n[1-{count}] Default=YES MaxTime=60
PartitionName=other Nodes=n[1-{count}] MaxTime=60
"""
"""A job that goes back into the queue starts again when its credentials have expired: here 5 s, mostly 120."""
GPUS = """
NodeName=n[1-{count}] Name=gpu File=/dev/null
NodeName=n[1-{count}] Name=gpu File=/dev/zero
"""
"""Slurm hands out any two files as GPUs: which task gets which is real."""


class Slurm:
    """A lab that is up."""

    def __init__(self, folder: Path, namespace: int) -> None:
        self.folder = folder
        self.namespace = namespace
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}

    def inside(self, words: Sequence[str | Path]) -> list[str]:
        """A command line that runs another inside the lab, as a process of the same number."""
        enter = ["nsenter", f"--target={self.namespace}", "--mount", f"--wdns={Path.cwd()}", "--"]
        return [*enter, *map(str, words)]

    def run(self, *words: str | Path, timeout: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a command inside the lab, to its end."""
        return subprocess.run(
            self.inside(words),
            env=environment(**{**self.variables, **variables}),
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def asked(self, *words: str) -> str:
        """What a command of Slurm prints; it has to end well."""
        ended = self.run(*words)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    def launch(self, *words: str | Path, **options) -> subprocess.CompletedProcess[str]:
        """Runs `spmdkit launch` inside the lab."""
        return self.run(*command("launch", *words), **options)

    def state(self, job: str) -> str:
        """The state of a job, in Slurm's word."""
        return self.asked("scontrol", "show", "job", "-o", job).partition("JobState=")[2].split()[0]

    def wait_for(self, job: str, *states: str, seconds: float = PATIENCE) -> None:
        """Waits until a job is in one of some states."""
        deadline = time.monotonic() + seconds
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state}, not {' or '.join(states)}"
            time.sleep(0.2)


@contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    """Starts a lab in a folder, and takes all of it down at the end."""
    missing = [tool for tool in ("slurmctld", "slurmd", "munged", "unshare", "nsenter") if shutil.which(tool) is None]
    assert not missing, f"{', '.join(missing)} missing: run tests/cluster/install as root"
    write_files(folder)
    with ExitStack() as stack:
        hosts = f"mount --bind {folder}/hosts /etc/hosts && exec sleep infinity"
        holder = daemon(
            stack, ["unshare", "--mount", "--propagation", "private", "bash", "-c", hosts], folder, "holder"
        )
        slurm = Slurm(folder, holder.pid)
        until(lambda: slurm.run("grep", "-q", "lab of spmdkit", "/etc/hosts").returncode == 0, folder)
        munge = f"munged --foreground --force --key-file={folder}/key --socket={folder}/munge.sock"
        munge += f" --pid-file={folder}/munged.pid --log-file={folder}/munged.log --seed-file={folder}/seed"
        daemon(stack, slurm.inside(munge.split()), folder, "munged")
        until(lambda: (folder / "munge.sock").exists(), folder)
        daemon(stack, slurm.inside(["slurmctld", "-D", "-f", folder / "slurm.conf"]), folder, "slurmctld")
        for number in range(1, NODES + 1):
            node = ["slurmd", "-D", "-N", f"n{number}", "-f", folder / "slurm.conf"]
            daemon(stack, slurm.inside(node), folder, f"slurmd-{number}")
        until(lambda: idle_nodes(slurm) == NODES, folder)
        try:
            yield slurm
        finally:
            slurm.run("scancel", "--user=root")
            until(lambda: not slurm.run("squeue", "--noheader").stdout.strip(), folder)
    assert_nothing_left(folder)


def write_files(folder: Path) -> None:
    """Writes the configuration, a key of munge, and the names of the hosts."""
    host = socket.gethostname()
    nodes = "\n".join(
        f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=8 Gres=gpu:2"
        for number in range(1, NODES + 1)
    )
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    text = CONF.format(host=host, port=free_port(), folder=folder, nodes=nodes, count=NODES, kill_wait=KILL_WAIT)
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text(GPUS.format(count=NODES))
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o400)
    names = " ".join(f"n{number}" for number in range(1, NODES + 1))
    (folder / "hosts").write_text(f"# lab of spmdkit\n127.0.0.1 localhost {host} {names}\n")


def daemon(stack: ExitStack, words: Sequence[str], folder: Path, name: str) -> subprocess.Popen[bytes]:
    """Starts a process that is ended with the stack, the last one first."""
    output = stack.enter_context((folder / f"{name}.out").open("wb"))
    variables = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    process = subprocess.Popen(words, env=variables, stdout=output, stderr=output, stdin=subprocess.DEVNULL)

    def end() -> None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)
    return process


def idle_nodes(slurm: Slurm) -> int:
    """How many nodes are ready for work."""
    said = slurm.run("sinfo", "--noheader", "--Node", "--partition=low", "--format=%T").stdout
    return said.split().count("idle")


def until(is_so, folder: Path, seconds: float = PATIENCE) -> None:
    """Waits until something is so; else shows what the daemons have said."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            for path in sorted([*folder.glob("*.out"), *folder.glob("*.log")]):
                print(f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}", file=sys.stderr)
            raise AssertionError("the Slurm of the tests does not come up, or down; what it said is above")
        time.sleep(0.1)
