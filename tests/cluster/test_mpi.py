"""Runs under a real mpirun: the losses of `--on local`, and what follows a kill, a mistake, Ctrl-C, a lost launcher."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support import runs
from support.processes import assert_nothing_left, begin, processes_of, wait_for, wait_for_step
from support.runs import command, metrics, spmdkit, trained, write_config

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.cluster]

TWO = {"nodes": 1, "processes_per_node": 2}
FAULTY = runs.source_module(
    """
    import os, signal, time
    from pathlib import Path

    FAULT = os.environ.get("FAULT", "")
    RANK = os.environ.get("OMPI_COMM_WORLD_RANK", "")
    """,
    take="""
    if FAULT == "slow":
        time.sleep(0.1)
    killed = Path(__file__).with_name("killed")
    if FAULT == "kill" and RANK == "1" and self.taken == 9 and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    """,
    opening="""
    if FAULT == "raise" and RANK == "1":
        raise KeyError("mine")
    """,
)


def faulty_config(folder, **sections):
    (folder / "faulty.py").write_text(FAULTY)
    return write_config(folder, data={"source": "faulty:rows"}, launch=TWO, **sections)


def started(config, folder) -> subprocess.Popen[str]:
    """A slow run that has trained some steps."""
    words = command("launch", config, "run.simulate=4", "--on", "mpi")
    process = begin(words, {"FAULT": "slow"}, stderr=subprocess.STDOUT, process_group=0)
    wait_for_step(folder.parent, 5, process)
    return process


@pytest.mark.parametrize(("on", "devices"), [("mpi", 4), ("mpi", 2), ("mpi:hosts", 4)])
def test_losses_match_local_processes(on, devices, tmp_path):
    config = write_config(tmp_path, launch={"processes_per_node": 8 // devices})
    if on == "mpi:hosts":
        (tmp_path / "hosts").write_text("localhost slots=1\n")
        on = f"mpi:{tmp_path}/hosts"
    processes = 8 // devices
    ended = trained("launch", config, f"run.simulate={devices}", "--on", on)
    trained("launch", config, f"run.dir={tmp_path}/local", "--on", f"local:{processes}x{devices}")
    folder = tmp_path / "run"
    assert metrics(folder) == metrics(tmp_path / "local")
    saved = [each / "checkpoints" for each in (folder, tmp_path / "local")]
    runs.assert_same_arrays(*(runs.state_arrays(config, 12, each) for each in saved))
    assert all(line.startswith(tuple(f"[{rank}] " for rank in range(processes))) for line in ended.stdout.splitlines())
    assert "[0] " in ended.stdout
    for rank in range(processes):
        assert "<stdout>" not in (folder / "logs" / f"rank-{rank}.log").read_text()
    assert "step 12/12" in (folder / "logs" / "rank-0.log").read_text()
    assert f"mpirun with {processes} processes" in ended.stderr
    assert_nothing_left(tmp_path)


def test_names_killed_rank_and_resumes(tmp_path):
    config = faulty_config(tmp_path)
    ended = trained("launch", config, "run.simulate=4", "--on", "mpi", "--restarts", "3", FAULT="kill")
    assert "spmdkit launch: rank 1 failed first: killed by SIGKILL" in ended.stderr
    assert "spmdkit launch: restarting" in ended.stderr
    trained("launch", config, f"run.dir={tmp_path}/local", "--on", "local:2x4")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "local")
    assert_nothing_left(tmp_path)


def test_returns_exit_code_of_mistake(tmp_path):
    config = faulty_config(tmp_path)
    ended = spmdkit("launch", config, "run.simulate=4", "--on", "mpi", FAULT="raise")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "spmdkit launch: rank 1 failed first: exit code 2" in ended.stderr
    assert "KeyError: 'mine'" in ended.stderr
    assert not (tmp_path / "run").exists(), "a command that cannot work leaves no trace"
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signal_to_launcher_saves(name, tmp_path):
    """mpirun alone would kill its processes a second after it."""
    config = faulty_config(tmp_path, train={"steps": 400, "global_batch": 16}, checkpoint={"every": 0})
    folder = tmp_path / "run"
    process = started(config, folder)
    process.send_signal(getattr(signal, name))
    printed, _ = process.communicate(timeout=90)
    assert process.returncode == 75, printed
    (step,) = (int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdecimal())
    assert step >= 5
    assert f"after step {step} of 400; saved." in printed
    assert f"stopped by {name}; the same command resumes the run" in printed
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("whom", ["launcher", "mpirun"])
def test_no_process_outlives_killed_rank(whom, tmp_path):
    config = faulty_config(tmp_path, train={"steps": 400, "global_batch": 16})
    process = started(config, tmp_path / "run")
    try:
        (mpirun,) = (pid for pid, words in commands_of(tmp_path).items() if words[0] == "mpirun")
        for pid in ranks_of(tmp_path):
            os.kill(pid, signal.SIGSTOP)
        os.kill(process.pid if whom == "launcher" else mpirun, signal.SIGKILL)
        printed, _ = process.communicate(timeout=60)
        assert_nothing_left(tmp_path)
        assert process.returncode == (75 if whom == "mpirun" else -signal.SIGKILL), printed
    finally:
        for pid in processes_of(tmp_path):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("whom", ["launcher", "mpirun"])
@pytest.mark.parametrize("delay", [0.0, 0.3, 1.0])
def test_no_process_outlives_launcher_killed_while_ranks_start(whom, delay, tmp_path):
    """Python has not run a line of them yet, or imports: nothing has asked the kernel to end them with mpirun."""
    config = faulty_config(tmp_path, train={"steps": 400, "global_batch": 16})
    words = command("launch", config, "run.simulate=4", "--on", "mpi")
    process = begin(words, {"FAULT": "slow"}, stderr=subprocess.STDOUT, process_group=0)
    try:
        wait_for(lambda: len(ranks_of(tmp_path)) == 2)
        time.sleep(delay)
        (mpirun,) = (pid for pid, words in commands_of(tmp_path).items() if words[0] == "mpirun")
        os.kill(process.pid if whom == "launcher" else mpirun, signal.SIGKILL)
        process.communicate(timeout=60)
        assert_nothing_left(tmp_path)
    finally:
        for pid in processes_of(tmp_path):
            os.kill(pid, signal.SIGKILL)


def commands_of(folder: Path) -> dict[int, list[str]]:
    """The arguments of the processes of a run."""
    found = {}
    for pid in processes_of(folder):
        with suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return found


def ranks_of(folder: Path) -> list[int]:
    """The processes that train."""
    return [pid for pid, words in commands_of(folder).items() if "train" in words and "mpirun" not in words]
