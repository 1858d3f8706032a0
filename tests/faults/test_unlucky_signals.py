"""Signals at moments when nothing listens yet, or something else is under way: a word, code 75, nothing left."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from left import catches, processes_of, wait_for, wait_until_none_of
from runs import command, environment, listing, losses, trained, write_config
from spmdkit.launch.supervision.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.multiprocess]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
OPTIONS = {"checkpoint": {"every": 4}, "eval": {"every": 0, "batches": 1}}


def started(*words, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*words], env=environment(**variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def assert_ended(process: subprocess.Popen[str], config: Path, code: int = 75) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, out + err
    said = [line for line in err.splitlines() if not line.startswith("[")]
    assert not any("Traceback" in line for line in said), err  # Python's own start knows no better word
    assert wait_until_none_of(config) == []
    return out + err


@pytest.mark.parametrize("words", [["train"], ["launch", "--on", "local:2x4"]])
@pytest.mark.parametrize("number", SIGNALS)
def test_before_anything_is_there(words, number, tmp_path):
    config = write_config(tmp_path)
    process = started(*command(words[0], config, *words[1:]))
    wait_for(lambda: catches(process.pid, signal.SIGTERM))
    process.send_signal(number)
    said = assert_ended(process, config)
    assert signal.Signals(number).name in said
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("after", [0.0, 0.5, 2.0])
def test_ctrl_c_while_processes_start(times, after, tmp_path):
    config = write_config(tmp_path)
    process = started(*command("launch", config, "--on", "local:2x4"))
    wait_for(lambda: len(processes_of(config)) > 1)
    time.sleep(after)
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    said = assert_ended(process, config)
    assert "stopped by SIGINT; the same command goes on" in said


def test_kill_of_the_launcher_while_processes_start(tmp_path):
    config = write_config(tmp_path)
    process = started(*command("launch", config, "--on", "local:4x2"))
    wait_for(lambda: len(processes_of(config)) > 3)
    process.kill()
    process.communicate(timeout=60)
    assert wait_until_none_of(config) == []
    trained("launch", config, "--on", "local:2x4")


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("rank", [0, 1])
def test_while_it_waits_for_the_others(rank, number, tmp_path):
    """One of two processes is at their meeting, and the other never comes."""
    config, port = write_config(tmp_path), free_port()
    with socket.socket() as other:
        if rank:  # the test is in the place of rank 0
            other.bind(("127.0.0.1", port))
            other.listen()
        process = started(
            *command("train", config),
            SPMDKIT_JOB_ADDRESSES=f"127.0.0.1:{port}",
            SPMDKIT_NUM_PROCESSES="2",
            SPMDKIT_PROCESS_ID=str(rank),
            SPMDKIT_SIMULATE="4",
        )
        if rank:
            other.accept()[0].close()
        else:
            wait_for(lambda: other.connect_ex(("127.0.0.1", port)) == 0)
    begin = time.monotonic()
    process.send_signal(number)
    said = assert_ended(process, config)
    assert f"ended by {number.name}" in said
    assert time.monotonic() - begin < 20
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", SIGNALS)
def test_the_launcher_while_its_processes_meet(number, tmp_path):
    """Rank 1 hangs before it joins; rank 0 waits for it."""
    config = write_config(tmp_path)
    faults = json.dumps([{"kind": "hang", "phase": "start", "rank": 1}])
    words = [sys.executable, "-m", "spmdkit.testing.worker", "launch", str(config), "--on", "local:2x4"]
    process = started(*words, SPMDKIT_FAULT=faults)
    wait_for(lambda: any(catches(pid, signal.SIGTERM) for pid in processes_of(config) if pid != process.pid))
    time.sleep(3)  # rank 0 listens
    process.send_signal(number)
    said = assert_ended(process, config)
    assert f"stopped by {number.name}; the same command goes on" in said


AT = Path(__file__).parent / "signal_at.py"
RESTORE = "spmdkit.training.checkpointing.checkpoints:Checkpoints.restore_newest"


@pytest.fixture(scope="module")
def half(tmp_path_factory) -> Path:
    """A run that was stopped at step 8 of 12, and its undisturbed end."""
    config = write_config(tmp_path_factory.mktemp("half"), **OPTIONS)
    trained("train", config, "train.steps=8")
    (config.parent / "run" / "report.html").unlink()
    return config


def test_in_a_restore(half, tmp_path):
    import shutil

    config = write_config(tmp_path, **OPTIONS)
    shutil.copytree(half.parent / "run", tmp_path / "run")
    before = listing(tmp_path / "run")
    process = started(sys.executable, str(AT), RESTORE, "SIGTERM", "train", str(config))
    said = assert_ended(process, config)
    assert "Stopped by SIGTERM after step 8 of 12, before any other was trained." in said
    after = listing(tmp_path / "run")
    kept = [name for name in before if name.startswith(("checkpoints", "metrics"))]
    assert [after[name][1] for name in kept] == [before[name][1] for name in kept]
    trained("train", config)
    assert list(losses(tmp_path / "run")) == list(range(1, 13))
