"""A rank that the kernel freezes, and one whose messages the network drops: the launcher names what happened."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.cluster import cluster
from support.runs import write_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.faults,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]
FREEZER = Path("/sys/fs/cgroup/freezer")
LONG = {
    "train": {"steps": 100_000, "global_batch": 16},
    "checkpoint": {"every": 0},
    "eval": {"every": 0},
    "timeouts": {"rendezvous": 60, "heartbeat": 10, "step": 120},
}


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    group = FREEZER / f"spmdkit-{pid}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        yield
    finally:
        (group / "freezer.state").write_text("THAWED")
        for member in (group / "cgroup.procs").read_text().split():
            with suppress(OSError):
                (FREEZER / "cgroup.procs").write_text(member)
        with suppress(OSError):
            group.rmdir()


@contextmanager
def cut_off(pid: int) -> Iterator[None]:
    """Drops all packets of the connections of a process, without a sign to either end."""
    lines = subprocess.run(["ss", "-tnpH"], check=True, capture_output=True, text=True).stdout.splitlines()
    ports = {line.split()[3].rpartition(":")[2] for line in lines if f"pid={pid}," in line}
    rules = [
        ["INPUT", "-i", "lo", "-p", "tcp", side, port, "-j", "DROP"]
        for port in ports
        for side in ("--sport", "--dport")
    ]
    for rule in rules:
        subprocess.run(["iptables", "-I", *rule], check=True)
    try:
        yield
    finally:
        for rule in rules:
            subprocess.run(["iptables", "-D", *rule], check=True)


@pytest.mark.skipif(not (FREEZER / "cgroup.procs").exists(), reason="needs the freezer of control groups, version 1")
@pytest.mark.parametrize("rank", [0, 1])
def test_names_frozen_rank(rank, tmp_path):
    config = write_config(tmp_path, **LONG)
    with cluster(config, processes=2, devices=4) as run:
        run.wait_for_step(5)
        with frozen(run.pids[rank]):
            ended = run.wait()
    assert ended.code == 75
    said = rf"rank {rank} failed first: frozen \(cgroup freezer, such as docker pause\), which blocked the others"
    assert re.search(said, ended.stderr), ended.stderr


@pytest.mark.skipif(not (shutil.which("iptables") and shutil.which("ss")), reason="needs iptables and iproute2")
def test_names_the_network(tmp_path):
    config = write_config(tmp_path, **LONG)
    with cluster(config, processes=2, devices=4) as run:
        run.wait_for_step(5)
        with cut_off(run.pids[1]):
            ended = run.wait()
    assert ended.code == 75
    said = "ranks 0, 1 may have failed first, which cannot be determined: the network between them lost their messages"
    assert said in ended.stderr, ended.stderr
