"""Real SSH servers, each a host: the same losses as here, and nothing left anywhere, whatever dies."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.processes import assert_gone, begin, stat_fields, wait, wait_for_step
from support.remote import SSHD, Keys, Server, command_line, descendants
from support.runs import QUICK, command, losses, metrics, spmdkit, trained, write_config

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.multiprocess]

STEPS = 200
ENVIRONMENT = {"environment": dict.fromkeys(QUICK)}
"""Processes of the hosts compile as those of tests do."""
LONG = {"run": {"simulate": 4, "log_every": 1}, "train": {"steps": STEPS, "global_batch": 16}, "launch": ENVIRONMENT}
LONG |= {"eval": {"every": 0, "batches": 2}, "checkpoint": {"every": 20}, "timeouts": {"heartbeat": 20}}


@pytest.fixture
def keys(tmp_path) -> Keys:
    assert Path(SSHD).exists(), "tests/cluster/install installs it"
    (tmp_path / "keys").mkdir()
    return Keys(tmp_path / "keys")


@pytest.fixture
def servers(tmp_path, keys):
    """Starts servers on 127.0.0.1, 127.0.0.2, ..."""
    started: list[Server] = []

    def start(count: int) -> list[Server]:
        for number in range(len(started) + 1, len(started) + count + 1):
            started.append(Server(tmp_path / f"host{number}", keys, f"127.0.0.{number}"))
        return started

    yield start
    for server in started:
        under = list(server.processes())
        server.stop()
        assert_gone(*under, seconds=30)


def write_hosts(folder: Path, keys: Keys, hosts: list[dict], **more) -> Path:
    path = folder / "hosts.yaml"
    tree = {"hosts": hosts, "python": sys.executable, "ssh": keys.words}
    path.write_text(yaml.safe_dump({**tree, **more}))
    return path


def launch(config: Path, hosts: Path, *more: str) -> subprocess.Popen[str]:
    words = command("launch", config, "--on", f"ssh:{hosts}", *more)
    return begin(words, stderr=subprocess.STDOUT, process_group=0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The folder of a run of two processes that nothing happened to."""
    config = write_config(tmp_path_factory.mktemp("undisturbed"), **LONG)
    trained("launch", config, "--on", "local:2x4")
    return config.parent / "run"


@pytest.mark.parametrize(("processes", "devices"), [(1, 4), (2, 2)])
def test_losses_match_local_processes(processes, devices, servers, keys, tmp_path):
    hosts = write_hosts(tmp_path, keys, [server.entry for server in servers(2)], processes=processes)
    for name in ("here", "there"):
        write_config(tmp_path / name, launch=ENVIRONMENT)
    trained("launch", tmp_path / "here" / "tiny.yaml", "--on", f"local:{2 * processes}x{devices}")
    ended = trained("launch", tmp_path / "there" / "tiny.yaml", f"run.simulate={devices}", "--on", f"ssh:{hosts}")
    assert metrics(tmp_path / "there" / "run") == metrics(tmp_path / "here" / "run")
    assert f"{2 * processes} processes: 127.0.0.1 rank" in ended.stderr
    assert all(line.startswith(tuple(f"[{rank}] " for rank in range(4))) for line in ended.stdout.splitlines())
    assert (tmp_path / "there" / "run" / "logs" / f"rank-{2 * processes - 1}.log").is_file()


def test_names_killed_worker_and_resumes(undisturbed, servers, keys, tmp_path):
    config = write_config(tmp_path, **LONG)
    first, second = servers(2)
    process = launch(config, write_hosts(tmp_path, keys, [first.entry, second.entry]), "--restarts", "2")
    wait_for_step(tmp_path, 45, process)  # the save of step 40 has waited for that of step 20
    os.kill(second.pid_of("-m spmdkit train"), signal.SIGKILL)
    printed, _ = process.communicate(timeout=250)
    assert process.returncode == 0, printed
    assert "spmdkit launch: rank 1 failed first: killed by SIGKILL" in printed
    assert "spmdkit launch: restarting from " in printed, printed
    assert losses(tmp_path / "run") == losses(undisturbed)


@pytest.mark.parametrize("killed", ["launcher", "client", "ssh", "session", "agent"])
def test_leaves_no_process_on_any_host(killed, servers, keys, tmp_path):
    config = write_config(tmp_path, **LONG)
    first, second = servers(2)
    process = launch(config, write_hosts(tmp_path, keys, [first.entry, second.entry]))
    wait_for_step(tmp_path, 3, process)
    there = [pid for server in (first, second) for pid in server.processes()]
    assert sum("-m spmdkit train" in line for server in (first, second) for line in server.processes().values()) == 2
    os.kill(victim(killed, process, second), signal.SIGKILL)
    printed, _ = process.communicate(timeout=100)
    assert_gone(*there, seconds=30)
    assert process.returncode == (-9 if killed == "launcher" else 75), printed
    if killed in ("ssh", "session", "agent"):
        assert "spmdkit launch: rank 1 failed first: exit code 75." in printed
        assert "  error: the connection to host 127.0.0.2 was lost" in printed
    if killed == "client":
        assert "spmdkit launch: rank 1 failed first: killed by SIGKILL" in printed


def test_silent_connection_counts_as_lost(servers, keys, tmp_path):
    config = write_config(tmp_path, **{**LONG, "train": {"steps": 100_000, "global_batch": 16}})
    first, second = servers(2)
    process = launch(config, write_hosts(tmp_path, keys, [first.entry, second.entry]))
    wait_for_step(tmp_path, 3, process)
    worker, session = second.pid_of("-m spmdkit train"), victim("session", process, second)
    os.kill(session, signal.SIGSTOP)
    try:
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == 75, printed
        assert "error: the connection to host 127.0.0.2 was lost (ssh: Timeout, server 127.0.0.2 not " in printed
        assert_gone(worker, seconds=60)
    finally:
        os.kill(session, signal.SIGKILL)


def victim(killed: str, process: subprocess.Popen, server: Server) -> int:
    """The process to kill; of those that there is one of for each rank, that of rank 1."""
    if killed == "launcher":
        return process.pid
    here = {pid: command_line(pid) for pid in descendants(process.pid)}
    if killed in ("client", "ssh"):
        start = "ssh " if killed == "ssh" else sys.executable
        (pid,) = (pid for pid, line in here.items() if line.startswith(start) and f"-- {server.address} exec" in line)
        return pid
    agent = int(stat_fields(server.pid_of("-m spmdkit train"))[1])
    return agent if killed == "agent" else int(stat_fields(agent)[1])


def test_signal_saves_and_run_resumes(undisturbed, servers, keys, tmp_path):
    config = write_config(tmp_path, **{**LONG, "checkpoint": {"every": 0}})
    hosts = write_hosts(tmp_path, keys, [server.entry for server in servers(2)])
    process = launch(config, hosts)
    wait_for_step(tmp_path, 5, process)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=150)
    assert process.returncode == 75, printed
    assert "Stopped by SIGTERM to rank" in printed
    assert "spmdkit launch: stopped by SIGTERM; the same command resumes the run" in printed
    (step,) = (int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert 5 <= step < STEPS
    ended = trained("launch", config, "--on", f"ssh:{hosts}")
    assert f"at step {step} of {STEPS}" in ended.stdout
    assert losses(tmp_path / "run") == losses(undisturbed)


def test_run_resumes_when_a_lost_host_is_back(undisturbed, servers, keys, tmp_path):
    config = write_config(tmp_path, **LONG)
    first, second = servers(2)
    process = launch(config, write_hosts(tmp_path, keys, [first.entry, second.entry]), "--restarts", "5")
    wait_for_step(tmp_path, 25, process)
    there = list(second.processes())
    second.die()
    assert_gone(*there, seconds=30)
    assert process.stdout is not None
    printed = ""
    while "spmdkit launch: host 127.0.0.2 does not answer (ssh: connect to host 127.0.0.2" not in printed:
        printed += (line := process.stdout.readline())
        assert line, printed
    second.start()
    printed += process.communicate(timeout=250)[0]
    assert process.returncode == 0, printed
    assert "error: the connection to host 127.0.0.2 was lost" in printed
    assert losses(tmp_path / "run") == losses(undisturbed)


def other_python(folder: Path, **versions: str) -> str:
    """A Python there whose packages say that they are of other versions."""
    for name, number in versions.items():
        info = folder / "other" / f"{name}-{number}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={folder}/other exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_reports_host_mistakes_before_starting(servers, keys, tmp_path):
    first, second, third = servers(3)
    config = write_config(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    entries = [{**first.entry, "python": "/no/such/python"}, {**second.entry, "directory": "/no/such/folder"}]
    entries.append({**third.entry, "directory": str(tmp_path / "elsewhere")})
    hosts = write_hosts(tmp_path, keys, entries)
    words = ("run.dir=new", "run.simulate=1", "strategy={data: 3}", "train.global_batch=9", "--on", f"ssh:{hosts}")
    (ended,) = wait([begin(command("launch", config.name, *words), cwd=tmp_path)], 200)
    assert ended.code == 2, ended.stderr
    for said in (
        "error: 3 problems with the hosts of ",
        "  127.0.0.1: /no/such/python cannot run there (exit code 127: ",
        "  127.0.0.2: missing directory /no/such/folder (No such file or directory).",
        "  127.0.0.3: run.dir new is not the directory of this machine",
    ):
        assert said in ended.stderr
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".spmdkit-*"))


def test_reports_a_host_with_another_version_of_jax(servers, keys, tmp_path):
    first, second = servers(2)
    other = {**second.entry, "python": other_python(tmp_path, jax="0.1")}
    hosts = write_hosts(tmp_path, keys, [first.entry, other])
    ended = spmdkit("launch", write_config(tmp_path), "run.simulate=4", "--on", f"ssh:{hosts}")
    assert ended.returncode == 2, ended.stderr
    assert "processes of this run differ" in ended.stderr
    assert "version of jax: " in ended.stderr
    assert "0.1 on rank 1" in ended.stderr
    assert not (tmp_path / "run").exists()


def test_reports_unknown_host_key(servers, keys, tmp_path):
    first, second = servers(2)
    config = write_config(tmp_path)
    (keys.folder / "known_hosts").write_text((keys.folder / "known_hosts").read_text().splitlines()[0] + "\n")
    hosts = write_hosts(tmp_path, keys, [first.entry, second.entry])
    ended = spmdkit("launch", config, "run.simulate=4", "--on", f"ssh:{hosts}")
    assert ended.returncode == 2
    assert "error: 1 problem with the hosts of " in ended.stderr
    said = "  127.0.0.2: ssh cannot log in (Host key verification failed.). Correct it until `ssh 127.0.0.2` logs in"
    assert said in ended.stderr
