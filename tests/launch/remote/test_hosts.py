"""The hosts file: its keys, and all of its problems at once."""

import pytest
from spmdkit.configs import ConfigError
from spmdkit.launch.remote.hosts import Host, read_hosts

FULL = """
hosts:
  - gpu1
  - {name: me@gpu2, port: 2222, address: 10.0.0.2, processes: 4, python: ~/venv/bin/python, directory: /data}
processes: 8
gpus_per_process: 1
python: /shared/venv/bin/python
ssh: ["-i", "/home/me/.ssh/cluster"]
"""


def write(folder, text):
    path = folder / "hosts.yaml"
    path.write_text(text)
    return path


def test_reads_all_keys(tmp_path):
    hosts = read_hosts(write(tmp_path, FULL))
    assert hosts.source == str(tmp_path / "hosts.yaml")
    first, second = hosts.hosts
    assert first == Host(name="gpu1", processes=8)
    assert second == Host(
        name="me@gpu2", port=2222, address="10.0.0.2", processes=4, python="~/venv/bin/python", directory="/data"
    )
    assert hosts.num_processes == 12
    assert hosts.gpus_per_process == 1
    assert hosts.python == "/shared/venv/bin/python"
    assert hosts.ssh == ("-i", "/home/me/.ssh/cluster")


def test_reads_names(tmp_path):
    hosts = read_hosts(write(tmp_path, "hosts: [gpu1, me@10.0.0.2, 'fe80::1%eth0']"))
    assert [host.reached_at for host in hosts.hosts] == ["gpu1", "10.0.0.2", "fe80::1%eth0"]
    assert hosts.num_processes == 3
    servers = read_hosts(write(tmp_path, "hosts: [{name: gpu1, port: 22}, {name: gpu1, port: 2222}]"))
    assert [host.port for host in servers.hosts] == [22, 2222], "the containers of one host"


@pytest.mark.parametrize(
    "text",
    [
        "gpu1\nme@gpu2\n",
        "# my hosts\n\ngpu1\nme@gpu2   # the big one\n",
        "gpu1 slots=1\nme@gpu2 slots=1",
        "- gpu1\n- me@gpu2",
        "[gpu1, me@gpu2]",
    ],
)
def test_reads_a_plain_list_of_names(text, tmp_path):
    hosts = read_hosts(write(tmp_path, text))
    assert hosts.hosts == (Host(name="gpu1", processes=1), Host(name="me@gpu2", processes=1))


def test_reads_slots_of_a_hostfile_and_addresses(tmp_path):
    hosts = read_hosts(write(tmp_path, "10.0.0.1 slots=8\nfe80::1%eth0\n"))
    assert [(host.name, host.processes) for host in hosts.hosts] == [("10.0.0.1", 8), ("fe80::1%eth0", 1)]


WRONG = {
    "hosts: []": "line 1: hosts must contain at least one host, such as {hosts: [gpu1, gpu2]}.",
    "processes: 2": "hosts must contain at least one host",
    "hosts: gpu1": "line 1: hosts must be a list, got 'gpu1' (string).",
    "gpu1 slot=8": "the file must be a mapping such as {hosts: [gpu1, gpu2]}, or a list of hosts, got 'gpu1 slot=8'.",
    "hosts:gpu1": "the file must be a mapping such as {hosts: [gpu1, gpu2]}, or a list of hosts, got 'hosts:gpu1'.",
    "gpu1 slots=999": "hosts.0.processes must be at most 256, got 999",
    "[gpu1, 7]": "hosts.1 must be a mapping (key: value), got 7 (integer).",
    "gpu1\ngpu1": "gpu1 is listed twice. List it once, with processes: 2 or more.",
    "hosts: [gpu1, 7]": "line 1: hosts.1 must be a mapping (key: value), got 7 (integer).",
    "hosts: [gpu1, gpu1]": "gpu1 is listed twice. List it once, with processes: 2 or more.",
    "hosts: [-oProxyCommand=date]": "line 1: hosts.0.name='-oProxyCommand=date' is not a valid host. Use a form",
    "hosts:\n  - {name: gpu1, prot: 22}": "line 2: hosts.0.prot is not a valid key. Did you mean hosts.0.port?",
    "hosts: [gpu1]\nhost: gpu2": "line 2: host is not a valid key. Did you mean hosts?",
    "hosts:\n  - {port: 22}": "line 1: hosts.0.name is required.",
    "hosts: [{name: gpu1, port: 70000}]": "hosts.0.port must be at most 65535, got 70000 (integer).",
    "hosts: [{name: gpu1, processes: 300}]": "hosts.0.processes must be at most 256, got 300",
    "hosts: [{name: gpu1, address: 'a b'}]": "line 1: hosts.0.address='a b' is not a valid host.",
    "hosts: [gpu1]\nprocesses: 0": "line 2: processes must be at least 1, got 0 (integer).",
    "hosts: [gpu1]\nenvironment: {A: b}": "line 2: environment is not a valid key. Did you mean launch.environment?",
    "hosts: [gpu1": "invalid YAML",
    "": "the file is empty.",
}


@pytest.mark.parametrize("text", WRONG)
def test_rejects_invalid_files(text, tmp_path):
    with pytest.raises(ConfigError) as raised:
        read_hosts(write(tmp_path, text))
    assert WRONG[text] in str(raised.value)
    assert raised.value.exit_code == 2


def test_reports_all_problems_at_once(tmp_path):
    text = "hosts: [gpu1, {name: gpu2, prot: 1}, {name: '-x'}]\nprocesses: none\nprocess: 2\n"
    with pytest.raises(ConfigError) as raised:
        read_hosts(write(tmp_path, text))
    assert str(raised.value).startswith(f"4 problems in {tmp_path}/hosts.yaml:")


@pytest.mark.parametrize("name", ["none.yaml", ""])
def test_rejects_missing_files(name, tmp_path):
    with pytest.raises(ConfigError, match="Use a YAML file such as"):
        read_hosts(tmp_path / name)
