"""Ports and names of jobs, and what a job of its own does not inherit; what is found is in test_detection.py."""

from job_variables import JAX, KERAS, OURS, SLURM, variables
from spmdkit.mesh.joining.detection import find_job
from spmdkit.mesh.joining.sources import FIRST_PORT, PORTS, SET_BY_HAND, port_of, without_job


def test_a_requeued_job_is_another_attempt():
    first, second = (find_job(variables(f"{SLURM} SLURM_RESTART_COUNT={count}")) for count in "01")
    assert first is not None
    assert second is not None
    assert first.identity != second.identity
    assert first.address != second.address


def test_a_job_of_its_own_inherits_nothing():
    environ = variables(f"{OURS} {KERAS} {JAX} {SLURM} SPMDKIT_TRACEBACK=1")
    left = without_job(environ)
    assert not SET_BY_HAND & left.keys()
    assert {"SPMDKIT_TRACEBACK", "SLURM_PROCID"} <= left.keys()


def test_ports_of_jobs():
    ports = {port_of(f"job {number}") for number in range(200)}
    assert all(FIRST_PORT <= port < FIRST_PORT + PORTS for port in ports)
    assert len(ports) > 180
