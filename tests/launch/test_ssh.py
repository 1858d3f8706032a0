"""What `--on ssh:hosts.yaml` would start, without a host; tests/cluster/ has real ones."""

import json
import shlex
import sys

import pytest
from spmdkit.launch import ssh
from spmdkit.launch.launchers import LaunchJob, LaunchRequest, find_launcher
from spmdkit.launch.remote import preflight
from spmdkit.launch.remote.client import VARIABLE
from spmdkit.launch.supervision.attempts import NotNow
from spmdkit.mesh.errors import UserError
from support.runs import write_config

HOSTS = """
hosts: [{name: me@one, address: 10.0.0.1}, {name: two, processes: 1, directory: ~/data}]
processes: 2
python: ~/venv/bin/python
"""
SIX = {
    "run": {"simulate": 2},
    "strategy": {"fsdp": {"size": 6, "floor_bytes": 256}},
    "train": {"steps": 2, "global_batch": 12},
    "launch": {"environment": {"HF_TOKEN": None, "NCCL_SOCKET_IFNAME": "eth0"}},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "secret")
    (tmp_path / "hosts.yaml").write_text(HOSTS)
    write_config(tmp_path, **SIX)
    return tmp_path


def read(folder, text=HOSTS):
    (folder / "hosts.yaml").write_text(text)
    return find_launcher("ssh:hosts.yaml")[1]


def test_dry_run_prints_every_process(folder, cli):
    lines = cli(0, "launch", "tiny.yaml", "--on", "ssh:hosts.yaml", "--dry-run", "train.steps=3").out.splitlines()
    assert lines[0::2] == ["# rank 0 on me@one", "# rank 1 on me@one", "# rank 2 on two"]
    words = shlex.split(lines[5])
    assert words[:2] == ["cd", "~/data"]
    job = ["SPMDKIT_JOB_ADDRESSES=10.0.0.1:PORT", "SPMDKIT_NUM_PROCESSES=3", "SPMDKIT_PROCESS_ID=2"]
    own = ["SPMDKIT_LOCAL_RANK=0", "SPMDKIT_LOCAL_PROCESSES=1"]
    assert words[3:10] == ["HF_TOKEN=$HF_TOKEN", "NCCL_SOCKET_IFNAME=eth0", *job, *own]
    assert words[11:] == ["~/venv/bin/python", "-P", "-m", "spmdkit", "train", "tiny.yaml", "train.steps=3"]
    assert lines[1].startswith(f"cd {folder} && ")
    assert not (folder / "run").exists()


def test_client_gets_its_task_from_the_environment(folder):
    hosts = read(folder)
    job, hosts = ssh.load(LaunchRequest("tiny.yaml"), hosts)
    starts = [ssh.build_start(job, hosts, slot, 4000, "attempt", True) for slot in ssh.list_slots(hosts)]
    assert [start.command[:3] for start in starts] == [[sys.executable, "-I", "-S"]] * 3
    assert [start.command[4:6] for start in starts] == [["me@one", "ssh"]] * 2 + [["two", "ssh"]]
    tasks = [json.loads(start.environment[VARIABLE]) for start in starts]
    assert [task["environment"]["SPMDKIT_PROCESS_ID"] for task in tasks] == ["0", "1", "2"]
    assert {task["environment"]["SPMDKIT_JOB_ID"] for task in tasks} == {"attempt"}
    assert {task["environment"]["SPMDKIT_JOB_ADDRESSES"] for task in tasks} == {"10.0.0.1:4000"}
    assert tasks[0]["environment"]["HF_TOKEN"] == "secret"
    assert tasks[0]["command"][1:] == ["-P", "-m", "spmdkit", "train", "tiny.yaml", "--fresh"]
    assert [task["directory"] for task in tasks] == [str(folder)] * 2 + ["~/data"]
    assert len({task["token"] for task in tasks}) == 3
    assert {each["silence"] for each in tasks} == {float(job.timeouts.heartbeat)}
    assert not any("secret" in word for start in starts for word in start.command), "others can read command lines"


def test_the_config_names_the_python_of_all_hosts(folder):
    hosts = read(folder, "hosts: [{name: one, python: /own/python}, two]\n")
    _, hosts = ssh.load(LaunchRequest("tiny.yaml", ("launch.python=/opt/python", "strategy={data: -1}")), hosts)
    assert [host.python for host in hosts.hosts] == ["/own/python", "/opt/python"]


@pytest.mark.parametrize(
    ("gpus", "visible", "local"),
    [("gpus_per_process: 2", ["0,1", "2,3"] * 2, [None] * 4), ("", [None] * 4, ["0", "1"] * 2)],
)
def test_assigns_gpus_to_processes(gpus, visible, local, folder):
    hosts = read(folder, f"hosts: [one, two]\nprocesses: 2\n{gpus}\n")
    job = LaunchJob.load(LaunchRequest("tiny.yaml", ("strategy={data: -1}",)))
    found = [ssh.slot_variables(job, hosts, slot, 1) for slot in ssh.list_slots(hosts)]
    assert [each.get("CUDA_VISIBLE_DEVICES") for each in found] == visible
    assert [each.get("SPMDKIT_LOCAL_RANK") for each in found] == local
    assert [each.get("SPMDKIT_LOCAL_PROCESSES") for each in found] == [rank and "2" for rank in local]


def test_hosts_by_rank_and_the_coordinator(folder):
    assert ssh.describe_hosts(read(folder)) == "3 processes: me@one ranks 0 and 1, two rank 2"
    assert ssh.coordinator_host(read(folder, "hosts: [me@gpu1]")) == "127.0.0.1"
    assert ssh.coordinator_host(read(folder, "hosts: [{name: gpu1, address: 10.0.0.1}]")) == "10.0.0.1"
    assert ssh.coordinator_host(read(folder, "hosts: [me@gpu1, gpu2]")) == "gpu1"


def test_rejects_unset_variables(folder, cli, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    error = cli(2, "launch", "tiny.yaml", "--on", "ssh:hosts.yaml").err
    assert "error: launch.environment takes HF_TOKEN from the shell" in error


def test_a_host_that_does_not_answer_counts_as_a_failed_attempt(folder, cli, monkeypatch):
    monkeypatch.setattr(preflight, "ask", lambda *_: [NotNow("does not answer")] * 2)
    told = cli(75, "launch", "tiny.yaml", "--on", "ssh:hosts.yaml", "--restarts", "1").err
    assert told.count("host me@one does not answer; host two does not answer") == 2
    assert "restarting in 1 s from the beginning, restart 1 of 1" in told
    assert "not restarted: 1 restarts made no newer checkpoint" in told
    assert not (folder / "run").exists()


def test_rejects_a_missing_file():
    with pytest.raises(UserError, match=r"--on 'ssh' is not valid: the file is missing; use ssh:FILE"):
        find_launcher("ssh")


def test_reads_names_from_the_command_line():
    _, hosts = find_launcher("ssh:gpu1, me@gpu2")
    assert [(host.name, host.processes) for host in hosts.hosts] == [("gpu1", 1), ("me@gpu2", 1)]
    for text, message in (("gpu1,-oProxyCommand=x", "is not a valid host"), ("gpu1,gpu1", "gpu1 is listed twice")):
        with pytest.raises(ValueError, match=message):
            find_launcher(f"ssh:{text}")
