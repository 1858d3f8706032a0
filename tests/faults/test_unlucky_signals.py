"""Signals at moments when nothing listens yet, or something else is under way: a word, code 75, nothing left."""

import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from spmdkit.launch.supervision.workers import free_port
from support.processes import begin, catches, processes_of, wait_for, wait_until_none_of
from support.runs import TESTS, at_moment, command, listing, losses, trained, write_config

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.multiprocess]


def assert_ended(process: subprocess.Popen[str], config: Path, code: int = 75) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, out + err
    said = [line for line in err.splitlines() if not line.startswith("[")]
    assert not any("Traceback" in line for line in said), err  # Python's own start knows no better word
    assert wait_until_none_of(config.parent) == []
    return out + err


@pytest.mark.parametrize(
    ("words", "number"),
    [(["train"], signal.SIGINT), (["train"], signal.SIGUSR1), (["launch", "--on", "local:2x4"], signal.SIGTERM)],
)
def test_signal_before_run_directory_exists(words, number, tmp_path):
    config = write_config(tmp_path)
    process = begin(command(words[0], config, *words[1:]))
    wait_for(lambda: catches(process.pid, signal.SIGTERM))
    process.send_signal(number)
    said = assert_ended(process, config)
    assert signal.Signals(number).name in said
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize(("times", "after"), [(2, 0.0), (1, 0.5), (2, 2.0)])
def test_ctrl_c_during_process_startup(times, after, tmp_path):
    config = write_config(tmp_path)
    process = begin(command("launch", config, "--on", "local:2x4"))
    wait_for(lambda: len(processes_of(config.parent)) > 1)
    time.sleep(after)
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    said = assert_ended(process, config)
    assert "stopped by SIGINT; the same command resumes the run" in said


def test_launcher_killed_during_process_startup(tmp_path):
    config = write_config(tmp_path)
    process = begin(command("launch", config, "--on", "local:4x2"))
    wait_for(lambda: len(processes_of(config.parent)) > 3)
    process.kill()
    process.communicate(timeout=60)
    assert wait_until_none_of(config.parent) == []
    trained("launch", config, "--on", "local:2x4")


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGINT), (1, signal.SIGTERM)])
def test_signal_during_rendezvous(rank, number, tmp_path):
    """One of two processes is at their meeting, and the other never comes."""
    config, port = write_config(tmp_path), free_port()
    with socket.socket() as other:
        if rank:  # the test is in the place of rank 0
            other.bind(("127.0.0.1", port))
            other.listen()
        own = {"SPMDKIT_JOB_ADDRESSES": f"127.0.0.1:{port}", "SPMDKIT_NUM_PROCESSES": "2", "SPMDKIT_SIMULATE": "4"}
        process = begin(command("train", config), {**own, "SPMDKIT_PROCESS_ID": str(rank)})
        if rank:
            other.accept()[0].close()
        else:
            wait_for(lambda: other.connect_ex(("127.0.0.1", port)) == 0)
    before = time.monotonic()
    process.send_signal(number)
    said = assert_ended(process, config)
    assert f"ended by {number.name}" in said
    assert time.monotonic() - before < 20
    assert not (tmp_path / "run").exists()


RESTORE = "spmdkit.checkpoints.manager:Checkpoints.restore_newest"


def test_signal_during_restore(tmp_path):
    config = write_config(tmp_path, checkpoint={"every": 4}, eval={"every": 0, "batches": 1})
    trained("train", config, "train.steps=8")
    (tmp_path / "run" / "report.html").unlink()
    before = listing(tmp_path / "run")
    words = at_moment(RESTORE, "1", "signal", "SIGTERM", "train", config)
    process = begin(words, {"PYTHONPATH": str(TESTS)})
    said = assert_ended(process, config)
    assert "Stopped by SIGTERM after step 8 of 12, before any other was trained." in said
    after = listing(tmp_path / "run")
    kept = [name for name in before if name.startswith(("checkpoints", "metrics"))]
    assert [after[name][1] for name in kept] == [before[name][1] for name in kept]
    trained("train", config)
    assert list(losses(tmp_path / "run")) == list(range(1, 13))
