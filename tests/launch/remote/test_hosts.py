"""The hosts file: what it may say, and that everything wrong with it is told at once."""

import pytest
from spmdkit.configs import ConfigError
from spmdkit.launch.remote.hosts import Host, read_hosts

FULL = """
hosts:
  - gpu1
  - {name: me@gpu2, port: 2222, address: 10.0.0.2, processes: 4, python: ~/venv/bin/python, directory: /data}
spares: [gpu9]
processes: 8
gpus_per_process: 1
python: /shared/venv/bin/python
forward: [HF_TOKEN]
environment: {NCCL_SOCKET_IFNAME: eth0, NCCL_IB_DISABLE: 1}
ssh: ["-i", "/home/me/.ssh/cluster"]
"""


def write(folder, text):
    path = folder / "hosts.yaml"
    path.write_text(text)
    return path


def test_everything_it_may_say(tmp_path):
    hosts = read_hosts(write(tmp_path, FULL))
    first, second = hosts.hosts
    assert first == Host(name="gpu1", processes=8, python="/shared/venv/bin/python")
    assert second == Host(
        name="me@gpu2", port=2222, address="10.0.0.2", processes=4, python="~/venv/bin/python", directory="/data"
    )
    assert [spare.name for spare in hosts.spares] == ["gpu9"]
    assert hosts.num_processes == 12
    assert (hosts.gpus_per_process, hosts.simulate) == (1, 0)
    assert (hosts.forward, dict(hosts.environment)) == (
        ("HF_TOKEN",),
        {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_DISABLE": 1},
    )
    assert hosts.ssh == ("-i", "/home/me/.ssh/cluster")


def test_names_alone(tmp_path):
    hosts = read_hosts(write(tmp_path, "hosts: [gpu1, me@10.0.0.2, 'fe80::1%eth0']"))
    assert [host.reached_at for host in hosts.hosts] == ["gpu1", "10.0.0.2", "fe80::1%eth0"]
    assert hosts.num_processes == 3


WRONG = {
    "hosts: []": "hosts must name one host at least",
    "simulate: 2": "hosts must name one host at least",
    "hosts: gpu1": "line 1: hosts must be a list such as [gpu1, gpu2], not 'gpu1' (text).",
    "[gpu1]": "the file must be a mapping such as {hosts: [gpu1, gpu2]}, not ['gpu1'] (a list).",
    "hosts: [gpu1, 7]": "hosts.1 must be the name of a host or a mapping of its keys, not 7 (a whole number).",
    "hosts: [gpu1, gpu1]": "gpu1 is named twice. Name it once, with processes: 2 or more.",
    "hosts: [gpu1]\nspares: [gpu1]": "gpu1 is named twice.",
    "hosts: [-oProxyCommand=date]": "hosts.0.name='-oProxyCommand=date' is not the name of a host.",
    "hosts: ['gpu1; date']": "hosts.0.name='gpu1; date' is not the name of a host.",
    "hosts:\n  - {name: gpu1, prot: 22}": "line 2: hosts.0.prot is not a key. Did you mean hosts.0.port?",
    "hosts:\n  - {port: 22}": "hosts.0.name must be given.",
    "hosts: [{name: gpu1, port: 70000}]": "hosts.0.port=70000 is not a port; the largest is 65535.",
    "hosts: [{name: gpu1, processes: 300}]": "hosts.0.processes=300 are too many for one host; at most 256.",
    "hosts: [{name: gpu1, address: 'a b'}]": "hosts.0.address='a b' is not the name or the address of a host.",
    "hosts: [gpu1]\nprocesses: 0": "line 2: processes must be at least 1, not 0 (a whole number).",
    "hosts: [gpu1]\nprocesses: 257": "line 2: processes=257 are too many for one host; at most 256.",
    "hosts: [gpu1]\nsimulate: 5000": "line 2: simulate=5000 devices are too many for one process; at most 4096.",
    "hosts: [gpu1]\nsimulate: 2\ngpus_per_process: 1": "exclude each other. Keep one of them.",
    "hosts: [gpu1]\nforward: [HF-TOKEN]": "forward or environment: 'HF-TOKEN' is not the name of a variable.",
    "hosts: [gpu1]\nenvironment: {A: yes, B: [1]}": "line 2: environment must be text or a whole number, not {'A'",
    "hosts: [gpu1]\nhost: x": "line 2: host is not a key. Did you mean hosts?",
    "hosts: [gpu1": "not valid YAML",
    "": "the file is empty.",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_told(text, tmp_path):
    with pytest.raises(ConfigError) as raised:
        read_hosts(write(tmp_path, text))
    assert WRONG[text] in str(raised.value)
    assert raised.value.exit_code == 2


def test_all_of_it_at_once(tmp_path):
    text = "hosts: [gpu1, {name: gpu2, prot: 1}, {name: '-x'}]\nprocesses: none\nsimulat: 2\n"
    with pytest.raises(ConfigError) as raised:
        read_hosts(write(tmp_path, text))
    assert str(raised.value).startswith(f"4 problems in {tmp_path}/hosts.yaml:")


@pytest.mark.parametrize("name", ["none.yaml", ""])
def test_no_such_file(name, tmp_path):
    with pytest.raises(ConfigError, match="Give a YAML file such as: hosts:"):
        read_hosts(tmp_path / name)
