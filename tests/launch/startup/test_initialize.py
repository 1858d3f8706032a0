"""Joining processes: arguments, environment, errors; and two real processes."""

import ast
import os
import socket
import sys

import jax
import pytest
from spmdkit.launch.startup import initialize as startup
from spmdkit.launch.startup.addresses import Address
from spmdkit.launch.startup.initialize import initialize
from spmdkit.launch.startup.rendezvous import Rendezvous
from spmdkit.launch.supervision.workers import free_port
from spmdkit.mesh import UserError
from support.launch_cases import OURS, variables
from support.processes import begin, wait


def rendezvous_of(count: int, *, hosts: list[str] | None = None, ips: list[str] | None = None, bind=None) -> Rendezvous:
    ips = ips or ["127.0.0.1"] * count
    return Rendezvous(hosts or ["here"] * count, [{"own_ip": ip} for ip in ips], bind)


@pytest.fixture
def calls(monkeypatch):
    """What `jax.distributed.initialize` is called with, in a process that has opened no devices and meets others."""
    recorded = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **arguments: recorded.append(arguments))
    monkeypatch.setattr(startup, "backend_started", lambda: False)
    monkeypatch.setattr(startup, "join_rendezvous", lambda job, **options: rendezvous_of(job.num_processes))
    monkeypatch.setattr(startup, "wait_until_listening", lambda address: None)
    for name in os.environ:
        if name.startswith(("SPMDKIT_", "KERAS_DISTRIBUTION_", "JAX_COORD", "JAX_NUM_PROC", "SLURM_", "OMPI_", "PMI")):
            monkeypatch.delenv(name)
    return recorded


def basics(call: dict) -> tuple:
    return call["coordinator_address"], call["num_processes"], call["process_id"]


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        (("10.0.0.1:1234,10.0.0.2:2345", 2, 0), ("10.0.0.1:1234", 2, 0)),  # a list: the first leads
        (("10.0.0.1:1234, 10.0.0.2:2345", None, 1), ("10.0.0.1:1234", 2, 1)),  # its length counts
        (("10.0.0.1:1234", 2, 1), ("10.0.0.1:1234", 2, 1)),  # the coordinator alone
    ],
)
def test_passes_arguments_on(calls, arguments, passed, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://proxy:1")
    monkeypatch.setenv("no_proxy", "x")
    initialize(*arguments, initialization_timeout=7, heartbeat_timeout_seconds=8, shutdown_timeout_seconds=9)
    assert basics(calls[0]) == passed
    timeouts = ("initialization_timeout", "heartbeat_timeout_seconds", "shutdown_timeout_seconds")
    assert [calls[0][name] for name in timeouts] == [7, 8, 9]
    assert calls[0]["cluster_detection_method"] == "deactivate"
    assert os.environ["no_proxy"] == "x,10.0.0.1", "gRPC would use the proxy and hang"


def test_leaves_a_cloud_tpu_to_jax(calls):
    initialize()
    assert "coordinator_address" not in calls[0]
    assert "cluster_detection_method" not in calls[0]


def test_rejects_a_call_without_a_job(calls, monkeypatch):
    def undetected(**arguments):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", undetected)
    with pytest.raises(UserError, match=r"found no other processes: .* Set SPMDKIT_JOB_ADDRESSES"):
        initialize()


def test_does_nothing_in_a_run_of_one_and_when_called_again(calls, monkeypatch):
    initialize("a:1", 1, 0)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    initialize("127.0.0.1:1", 2, 0)
    assert calls == []


def test_arguments_take_precedence(calls, monkeypatch):
    for name, value in variables(OURS.replace("ID=3", "ID=2")).items():
        monkeypatch.setenv(name, value)
    initialize("10.0.0.1:1234", 5)
    initialize("10.0.0.1:1234", 5, 0)
    assert [basics(call) for call in calls] == [("10.0.0.1:1234", 5, 2), ("10.0.0.1:1234", 5, 0)]


def test_the_coordinator_binds_to_the_rendezvous_address(calls, monkeypatch):
    bind = Address("127.0.0.1", 5)
    monkeypatch.setattr(startup, "join_rendezvous", lambda job, **options: rendezvous_of(2, bind=bind))
    initialize("localhost:5", 2, 0)
    assert calls[0]["coordinator_bind_address"] == "127.0.0.1:5"
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "[::]:5")
    initialize("localhost:5", 2, 0)
    assert calls[1]["coordinator_bind_address"] is None  # JAX reads that itself


@pytest.mark.parametrize(
    ("hosts", "ips", "says"),
    [
        (["a", "a"], ["127.0.1.1", "127.0.1.1"], None),  # one host may
        (["a", "b"], ["10.0.0.1", "10.0.0.2"], None),
        (["a", "b"], ["10.0.0.1", "127.0.1.1"], r"Host b \(rank 1\) resolves its own name to 127.0.1.1, but CPU"),
        (["a", "b"], ["10.0.0.1", ""], r"Host b \(rank 1\) resolves its own name to nothing.* its /etc/hosts"),
    ],
)
def test_checks_the_host_names_of_cpu_collectives(hosts, ips, says):
    found = rendezvous_of(2, hosts=hosts, ips=ips)
    startup.check_host_names(found, on_cpu=False)
    if says is None:
        startup.check_host_names(found, on_cpu=True)
        return
    with pytest.raises(UserError, match=says):
        startup.check_host_names(found, on_cpu=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a:1", 2, 2), r"process_id=2 must be in 0 \.\. num_processes - 1 = 1"),
        (("a:1", 0, 0), "num_processes=0 must be at least 1"),
        ((None, 1, -5), "process_id=-5 must be at least 0"),
        (("a:1", 2, -1), "process_id=-1 must be at least 0"),
        (("a:1", None, None), "With job_addresses=a:1, this process is one of several. Missing: the number"),
        (("a", 2, 0), "job_addresses='a' must be host:port"),
        ((None, 2, 0), "With num_processes=2, process_id=0, .* Missing: host:port of process 0"),
    ],
)
def test_rejects_arguments(calls, arguments, message):
    with pytest.raises(ValueError, match=message):
        initialize(*arguments)
    assert calls == []


def test_rejects_a_call_after_jax_opened_devices():
    with pytest.raises(RuntimeError, match=r"too late: JAX has already opened its devices.*would train alone") as info:
        initialize("127.0.0.1:1", 2, 0)
    assert isinstance(info.value, UserError)  # on the command line a mistake (2), not an error of ours


WORKER = """
import os, sys
from pathlib import Path
from spmdkit import initialize
from spmdkit.mesh import DeviceMesh, get_device_count, is_main_process, list_devices, simulate
simulate(2)
initialize()
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
mesh = DeviceMesh.of(data=2, fsdp=2)
assert list_devices() == ["cpu:0", "cpu:1", "cpu:2048", "cpu:2049"] and get_device_count() == 4
assert mesh.axes_across_processes == ("data",) and "crosses processes: data" in str(mesh)
assert is_main_process() == (jax.process_index() == 0)
rows = jax.device_put(np.arange(4.0), NamedSharding(mesh.backend_mesh, PartitionSpec(("data", "fsdp"))))
print(float(jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh.backend_mesh, PartitionSpec()))(rows)))
port = int(os.environ["SPMDKIT_JOB_ADDRESSES"].rpartition(":")[2])
tables = [path.read_text() for path in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")) if path.exists()]
sockets = [line.split() for table in tables for line in table.splitlines()]
print({words[1].partition(":")[0] for words in sockets if words[3] == "0A" and words[1].endswith(f":{port:04X}")})
"""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("host", ["127.0.0.1", socket.gethostname()], ids=["loopback", "the host's own name"])
def test_two_processes_make_one_mesh(host):
    address = f"{host}:{free_port()}"
    common = {"SPMDKIT_JOB_ADDRESSES": address, "SPMDKIT_NUM_PROCESSES": "2"}
    programs = [[sys.executable, "-c", WORKER]] * 2
    ended = wait([begin(each, {**common, "SPMDKIT_PROCESS_ID": str(rank)}) for rank, each in enumerate(programs)])
    assert [each.stdout.splitlines()[-2:-1] for each in ended] == [["6.0"], ["6.0"]], ended
    listening = ast.literal_eval(ended[0].stdout.splitlines()[-1])
    assert len(listening) == 1, listening
    assert not listening & {"0" * 8, "0" * 32}, "all interfaces"
