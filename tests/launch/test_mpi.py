"""`spmdkit launch --on mpi` before there is a process: the command line of mpirun, and how its last words are read."""

import shlex
import signal

import pytest
from spmdkit.launch import mpi
from spmdkit.launch.launchers import LaunchRequest, find_launcher
from spmdkit.launch.mpi import find_coordinator, find_first_failure, find_outcome, read_hostfile
from spmdkit.launch.supervision.attempts import NotNow
from spmdkit.launch.supervision.blame import Exit, Outcome
from spmdkit.launch.supervision.output import TaggedOutput
from support.runs import spmdkit, write_config

RANK_EXITED = """
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:
  Process name: [[14779,1],1]
  Exit code:    3
"""
RANK_KILLED = "mpirun noticed that process rank 2 with PID 0 on node vm exited on signal 9 (Killed)."


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# ours\nnode1 slots=4\n\nnode2 slots=4  # the second\n")
    return path


def command(tmp_path, *overrides, on="mpi", **options) -> list[str]:
    config = write_config(tmp_path, launch={"nodes": 1, "processes_per_node": 2})
    place, target = find_launcher(on)
    return shlex.split(place.describe(LaunchRequest(str(config), ("run.simulate=4", *overrides), **options), target))


def test_parses_targets(hostfile):
    assert find_launcher("mpi") == (mpi, "")
    assert find_launcher(f"mpi:{hostfile}") == (mpi, str(hostfile))
    with pytest.raises(ValueError, match="missing file 'nowhere'; use"):
        find_launcher("mpi:nowhere")
    with pytest.raises(ValueError, match=r"\(for 4 processes: --on mpi launch\.processes_per_node=4\); use"):
        find_launcher("mpi:4")


def test_command_line(tmp_path):
    words = command(tmp_path, fresh=True)
    at = words.index("mpirun")
    given = ["SPMDKIT_JOB_ADDRESSES=127.0.0.1:PORT", "PYTHONUNBUFFERED=1", "TERM=dumb", "SPMDKIT_BOUND=1"]
    assert words[:at] == given
    assert words[at + 1 : at + 7] == ["-n", "2", "--tag-output", "--bind-to", "none", "--oversubscribe"]
    assert words[words.index("--map-by") + 1] == "ppr:2:node"
    named = {words[index + 1] for index, word in enumerate(words) if word == "-x"}
    assert {word.partition("=")[0] for word in given} <= named
    assert words[-7:] == ["-P", "-m", "spmdkit", "train", str(tmp_path / "tiny.yaml"), "run.simulate=4", "--fresh"]


def test_command_line_with_options_of_the_config(tmp_path):
    words = command(
        tmp_path,
        "launch.environment={MINE: 'a b'}",
        "launch.setup=['module load cuda', 'x=\"1 2\"']",
        "launch.mpi.options=['--mca', 'oob_tcp_if_include', 'eth0']",
        "launch.prefix=[apptainer, exec, image.sif]",
        "launch.python=/opt/python",
    )
    at = words.index("MINE=a b")
    assert words[at + 1 : at + 6] == ["bash", "-c", 'module load cuda\nx="1 2"\nexec "$@"', "bash", "mpirun"]
    assert words[words.index("MINE") - 1] == "-x"
    options = ["--mca", "oob_tcp_if_include", "eth0", "apptainer", "exec", "image.sif", "/opt/python"]
    at = words.index("--mca")
    assert words[at : at + len(options)] == options


def test_find_coordinator(hostfile, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.delenv("PBS_NODEFILE", raising=False)
    assert find_coordinator(1, "", "7") == "127.0.0.1:7"
    assert find_coordinator(2, str(hostfile), "7") == "node1:7"
    with pytest.raises(ValueError, match="but the hosts are not known"):
        find_coordinator(2, "", "7")
    monkeypatch.setenv("PBS_NODEFILE", str(hostfile))
    assert find_coordinator(2, "", "7") == "node1:7"
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    assert find_coordinator(2, "", "7") == "", "the processes read Slurm's list themselves"
    hostfile.write_text("localhost\nnode2\n")
    monkeypatch.setattr(mpi.socket, "gethostname", lambda: "here.example.org")
    assert find_coordinator(2, str(hostfile), "7") == "here.example.org:7", "others do not reach localhost"
    assert find_coordinator(1, str(hostfile), "7") == "127.0.0.1:7", "the other host is not needed"
    hostfile.write_text("localhost\nhere\n")
    assert find_coordinator(2, str(hostfile), "7") == "127.0.0.1:7"


def test_a_hostfile_that_names_too_few(tmp_path, hostfile):
    assert read_hostfile(str(hostfile)) == ["node1", "node2"]
    with pytest.raises(ValueError, match=r"launch.nodes=8 hosts, but .*hosts lists 2. Add the missing hosts"):
        command(tmp_path, "launch.nodes=8", "launch.processes_per_node=1", "run.simulate=1", on=f"mpi:{hostfile}")
    hostfile.write_text("# nothing\n")
    with pytest.raises(ValueError, match="is empty"):
        read_hostfile(str(hostfile))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (RANK_EXITED, (1, 3)),
        (RANK_KILLED, (2, -signal.SIGKILL)),
        ("  Process name: [prterun-vm-123@1,0]\n  Exit code:    75", (0, 75)),
        ("There are not enough slots available", None),
    ],
)
def test_find_first_failure(lines, expected):
    assert find_first_failure(lines.splitlines()) == expected


def ended(tmp_path, own: str, code: int, *, stopped: bool = False) -> Outcome:
    output = TaggedOutput(tmp_path, 4, "mpirun")
    output.own.extend(own.splitlines())
    number = signal.SIGINT if stopped else None
    return find_outcome(Outcome((Exit(0, code, stopped),), number, (["words of mpirun"],)), output)


def test_outcome_is_that_of_the_ranks(tmp_path):
    assert ended(tmp_path, RANK_EXITED, 3).exits == (Exit(1, 3),)
    assert ended(tmp_path, RANK_EXITED, 3).exit_code == 3
    assert ended(tmp_path, RANK_KILLED, 137).exit_code == 75
    assert ended(tmp_path, "", 0).exit_code == 0
    assert ended(tmp_path, RANK_EXITED, 3, stopped=True).exit_code == 75, "it was told to end"
    assert ended(tmp_path, "", 130, stopped=True).exit_code == 75
    assert ended(tmp_path, "", 0).tails == ([], [], [], [])


def test_failure_of_mpirun_itself(tmp_path):
    with pytest.raises(ValueError, match=r"mpirun could not start the processes \(code 1\):\n  There are not enough"):
        ended(tmp_path, "There are not enough slots available in the system", 1)
    with pytest.raises(NotNow, match=r"mpirun itself failed \(code 1\), not a process of the run:\n  ORTE was"):
        ended(tmp_path, "ORTE was unable to reliably start one or more daemons.", 1)


@pytest.mark.long_cases("HYDRA build-not Open MPI's", "None-mpirun is not on PATH")
@pytest.mark.parametrize(("says", "message"), [(None, "mpirun is not on PATH"), ("HYDRA build", "not Open MPI's")])
def test_without_open_mpi_nothing_is_written(says, message, tmp_path):
    config = write_config(tmp_path, launch={"processes_per_node": 2})
    if says:
        (tmp_path / "mpirun").write_text(f"#!/bin/sh\necho {says}\n")
        (tmp_path / "mpirun").chmod(0o755)
    ended = spmdkit("launch", config, "run.simulate=4", "--on", "mpi", PATH=str(tmp_path))
    assert ended.returncode == 2
    assert message in ended.stderr
    assert not (tmp_path / "run").exists()
