"""Environment variables of the launchers: integers, addresses, host lists, ports."""

import pytest
from spmdkit.launch.startup.variables import (
    FIRST_PORT,
    PORTS,
    expand_counts,
    expand_hosts,
    job_port,
    without_job_variables,
)
from spmdkit.launch.startup.worker import job_environment
from spmdkit.mesh.errors import UserError
from support.launch_cases import JAX, KERAS, SLURM, job_of, variables


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("a,b", ["a", "b"]),
        ("n[1-4,7]", ["n1", "n2", "n3", "n4", "n7"]),
        ("n[001-003]", ["n001", "n002", "n003"]),
        ("n[08-11],login", ["n08", "n09", "n10", "n11", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[1-2].cluster", ["n1.cluster", "n2.cluster"]),
    ],
)
def test_expands_host_lists(text, hosts):
    assert expand_hosts(text, "SLURM_X") == hosts


@pytest.mark.parametrize("text", ["", "n[1-", "a,,b", "n[1-x]", "n[1-99999999]", "n[4-1]", "n[4-1],b"])
def test_rejects_invalid_host_lists(text):
    with pytest.raises(UserError, match="SLURM_X='"):
        expand_hosts(text, "SLURM_X")


@pytest.mark.parametrize(("text", "counts"), [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("1,2", [1, 2])])
def test_expands_task_counts(text, counts):
    assert expand_counts(text) == counts


def test_a_requeued_job_has_another_identity():
    first, second = (job_of(f"{SLURM} SLURM_RESTART_COUNT={count}") for count in "01")
    assert first.identity != second.identity
    assert first.address != second.address


def test_removes_job_variables_for_another_job():
    kept = variables(f"{SLURM} SPMDKIT_TRACEBACK=1")
    ours = job_environment("host0:1234", 4, 3, simulate=2, identity="try 2", local_rank=0, local_processes=2)
    assert without_job_variables(variables(f"{KERAS} {JAX}") | ours | kept) == kept


def test_ports_differ_between_jobs():
    ports = {job_port(f"job {number}") for number in range(200)}
    assert all(FIRST_PORT <= port < FIRST_PORT + PORTS for port in ports)
    assert len(ports) > 180
