import socket

import pytest
from spmdkit.launch.diagnosis.job import coordinator, others, who
from spmdkit.mesh.joining.addresses import Address
from spmdkit.mesh.joining.detection import Job, find_job

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


def free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_one_process():
    assert [finding.found for finding in who(None)] == ["one process: no variable says that there are others"]


def test_every_part_names_its_variable():
    job = find_job(SLURM)
    assert job is not None
    assert [(finding.found, finding.variable) for finding in who(job)] == [
        ("process 3 of 4", "SLURM_PROCID, SLURM_NTASKS"),
        ("said by Slurm", ""),
        (str(job.address), "SLURM_STEP_NODELIST"),
        ("process 1 of 2 on its host", "SLURM_LOCALID"),
        ("identity: slurm 77.0 restart 0", "SLURM_JOB_ID"),
    ]
    assert others(job, SLURM) == []


def test_who_says_something_else():
    environ = {**SLURM, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    job = find_job({**environ, "PMIX_NAMESPACE": "1"})
    (found,) = others(job, environ)
    assert (found.level, found.found) == ("note", "Slurm says process 3 of 4: not believed, it comes later")


def test_a_free_port():
    address = Address("127.0.0.1", free())
    (found,) = coordinator(Job("test", address, 2, 0), {}, False)
    assert (found.level, found.found) == ("ok", f"port {address.port} is free; listens on 127.0.0.1 alone")


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (found,) = coordinator(Job("test", Address("127.0.0.1", port), 2, 0), {}, False)
    assert (found.level, found.found) == ("wrong", f"port {port} is in use on {socket.gethostname()}")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_unknown_host(rank):
    (found,) = coordinator(Job("test", Address("no-such-host.invalid", 80), 2, rank), {}, False)
    assert found.level == "wrong"
    assert found.found.startswith(f"no-such-host.invalid is unknown on {socket.gethostname()}: ")


def test_loopback_with_several_hosts():
    (found,) = coordinator(Job("test", Address("127.0.0.1", 80), 2, 0), {}, True)
    assert (found.level, found.found) == ("wrong", "127.0.0.1:80 means another host on each host")


def test_a_proxy_in_the_way():
    job = Job("test", Address("127.0.0.1", free()), 2, 0)
    found = coordinator(job, {"http_proxy": "http://proxy"}, False)[0]
    assert (found.level, found.variable) == ("note", "http_proxy")
    assert coordinator(job, {"http_proxy": "http://proxy", "no_proxy": "127.0.0.1"}, False)[0].name == "coordinator"
