"""What keeps processes from joining is one message each, in bounded time: real processes, real sockets."""

import re
import signal
import socket
import subprocess
import time

import pytest
from spmdkit.launch.supervision.workers import free_port
from support.processes import begin, wait_for
from support.runs import command, source_module, write_config

pytestmark = [pytest.mark.faults, pytest.mark.multiprocess]


class Processes:
    """Processes of `spmdkit train` under way."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def start(self, rank: int, address: str, *overrides: str, count: int = 2, rendezvous: int = 30, **variables: str):
        own = {"SPMDKIT_JOB_ADDRESSES": address, "SPMDKIT_NUM_PROCESSES": str(count), "SPMDKIT_PROCESS_ID": str(rank)}
        config = write_config(self.folder, train={"steps": 2, "global_batch": 16})
        words = command("train", config, f"timeouts.rendezvous={rendezvous}", *overrides)
        process = begin(words, {"SPMDKIT_SIMULATE": str(8 // count), **own, **variables})
        self.started.append(process)
        return process


@pytest.fixture
def processes(tmp_path):
    found = Processes(tmp_path)
    yield found
    for process in found.started:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], seconds: float = 120) -> tuple[int, str]:
    _, printed = process.communicate(timeout=seconds)
    assert "Traceback" not in printed, printed
    return process.returncode, printed


def here() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.mark.parametrize("rank", [0, 1])
def test_reports_unknown_host(processes, rank):
    before = time.monotonic()
    code, printed = ended(processes.start(rank, "no-such-host.invalid:1234", rendezvous=2))
    assert code == 2
    assert "error: The coordinator's host 'no-such-host.invalid' (SPMDKIT_JOB_ADDRESSES) is unknown on" in printed
    assert time.monotonic() - before < 60


def test_reports_port_in_use(processes):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        first, second = processes.start(0, address), processes.start(1, address)
        code, printed = ended(first)
        assert code == 75
        assert f"error: The port of the coordinator's address {address} is in use on" in printed
        code, printed = ended(second)
        assert code == 75
        assert "a program that is not rank 0 of this run answers there" in printed


def test_names_missing_ranks(processes):
    address = here()
    waiting = [processes.start(rank, address, count=4, rendezvous=12) for rank in (0, 2)]
    found = [ended(process) for process in waiting]
    assert [code for code, _ in found] == [75, 75]
    said = "error: Ranks 1 and 3 did not come within 12 s (timeouts.rendezvous); 2 of 4 processes did"
    assert all(said in printed for _, printed in found)
    assert "waiting for ranks 1 and 3 at" in found[0][1]


def test_reports_missing_rank_0(processes):
    code, printed = ended(processes.start(1, here(), rendezvous=12))
    assert code == 75
    assert re.search(r"waiting for rank 0 at 127.0.0.1:\d+ \(1\d s\): connection refused", printed)
    assert "error: Rank 0 was not reachable at" in printed


def test_rejects_second_job_on_one_address(processes, tmp_path):
    """The second is refused, and the first trains."""
    address = here()
    other = f"run.dir={tmp_path / 'other'}"
    first = [processes.start(0, address, rendezvous=300)]
    wait_until_listening(address)
    code, printed = ended(processes.start(0, address, other))
    assert (code, "is in use on" in printed) == (75, True), printed
    code, printed = ended(processes.start(1, address, other))
    assert (code, "belongs to another run" in printed) == (2, True), printed
    assert not (tmp_path / "other").exists()
    first.append(processes.start(1, address, rendezvous=300))
    for process in first:
        code, printed = ended(process)
        assert code == 0, printed


def test_second_job_does_not_disturb_training(processes, tmp_path):
    """JAX's own coordinators would share the port, and abort each other. They listen only on loopback."""
    address = here()
    first = [processes.start(rank, address, "train.steps=100000") for rank in range(2)]
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text())
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", int(address.rpartition(":")[2])), timeout=5)
    second = [processes.start(rank, address, f"run.dir={tmp_path / 'other'}", rendezvous=15) for rank in range(2)]
    for process in second:
        code, printed = ended(process)
        assert code == 75, printed
    assert [process.poll() for process in first] == [None, None]
    first[0].send_signal(signal.SIGTERM)
    assert [ended(process)[0] for process in first] == [75, 75]


def test_slow_reader_outlasts_gloo_timeout(processes, tmp_path):
    """Gloo gives up 30 s after the first process has come to a collective; nobody comes to one before all can."""
    slow = source_module("import os, time", "", "time.sleep(40 * int(os.environ['SPMDKIT_PROCESS_ID']))")
    (tmp_path / "slow.py").write_text(slow)
    address = here()
    found = [processes.start(rank, address, "data.source=slow:rows", rendezvous=120) for rank in range(2)]
    printed = [ended(process, 200) for process in found]
    assert [code for code, _ in printed] == [0, 0], printed
    assert "waiting for rank 1 at 'the folder of the run was read'" in printed[0][1]


def wait_until_listening(address: str, seconds: float = 180) -> None:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        else:
            return
