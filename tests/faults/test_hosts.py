"""Two hosts, each a network namespace with an address and a name of its own, as far as processes can tell."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.processes import begin
from support.runs import command, losses, trained, write_config

pytestmark = [
    pytest.mark.faults,
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="makes addresses: run this as root, with the package iproute2",
    ),
]
ADDRESSES = ("10.99.77.1", "10.99.77.2")
PORT = 8476


class Hosts:
    """Two hosts with a link between them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = [f"spmdkit{os.getpid()}{letter}" for letter in "ab"]
        self.started: list[subprocess.Popen[str]] = []
        ends = [f"v{os.getpid()}{letter}" for letter in "ab"]
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "netns", self.names[0], "type", "veth", "peer", ends[1], "netns", self.names[1])
        for name, end, address in zip(self.names, ends, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")

    def start(self, host: int, *arguments, loopback: bool = False) -> subprocess.Popen[str]:
        """Starts a process of spmdkit on a host, whose own name leads to its address, or to loopback."""
        own = "127.0.1.1" if loopback else ADDRESSES[host]
        lines = [f"{own if index == host else address} host{index}" for index, address in enumerate(ADDRESSES)]
        file = self.folder / f"hosts{host}"
        file.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        script = f'hostname host{host} && mount --bind {file} /etc/hosts && exec "$@"'
        there = ["ip", "netns", "exec", self.names[host], "unshare", "--uts", "--mount", "sh", "-c", script, "sh"]
        variables = {"SPMDKIT_JOB_ADDRESSES": f"{ADDRESSES[0]}:{PORT},{ADDRESSES[1]}:{PORT}", "SPMDKIT_SIMULATE": "4"}
        process = begin([*there, *command(*arguments)], {"SPMDKIT_PROCESS_ID": str(host), **variables})
        self.started.append(process)
        return process

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()
        for name in self.names:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts(tmp_path) -> Iterator[Hosts]:
    found = Hosts(tmp_path)
    yield found
    found.end()


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    return [(each.returncode, *out) for each in processes for out in [each.communicate(timeout=200)]]


def test_two_hosts_train_as_one_process(hosts, tmp_path):
    config = write_config(tmp_path, train={"steps": 3, "global_batch": 16})
    found = ended([hosts.start(host, "train", config) for host in range(2)])
    assert [code for code, _, _ in found] == [0, 0], found
    trained("train", config, f"run.dir={tmp_path / 'alone'}")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


def test_reports_host_name_that_resolves_to_loopback(hosts, tmp_path):
    """Gloo would fail later: connection refused, remote=[127.0.1.1]."""
    config = write_config(tmp_path, train={"steps": 3, "global_batch": 16})
    found = ended([hosts.start(host, "train", config, loopback=host == 1) for host in range(2)])
    for code, _, printed in found:
        assert code == 2, printed
        assert "error: Host host1 (rank 1) resolves its own name to 127.0.1.1, but CPU collectives" in printed
    assert not (tmp_path / "run").exists()


def test_doctor_on_two_hosts(hosts, tmp_path):
    config = write_config(tmp_path)
    found = ended([hosts.start(host, "doctor", config, loopback=host == 1) for host in range(2)])
    assert [code for code, _, _ in found] == [2, 2], found
    printed = found[0][1]
    assert "all 2 have connected: 1 on host0, 1 on host1" in printed
    assert f"rank 0: listens on {ADDRESSES[0]}:{PORT} only" in printed
    assert "WRONG host name     Host host1 (rank 1) resolves its own name to 127.0.1.1" in printed
    assert "all 2 processes see the same" in printed
