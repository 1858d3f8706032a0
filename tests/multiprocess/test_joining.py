"""Two real processes join by the variables of a launcher alone."""

import sys

import pytest
from spmdkit.launch.supervision.workers import free_port
from support.processes import Ended, begin, wait

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

PROGRAM = """
from spmdkit.configs.schema import Timeouts
from spmdkit.launch.startup.worker import joins_processes, count_processes
with joins_processes(Timeouts(rendezvous=60, shutdown=20), "runs/x"):
    from jax._src import distributed
    state = distributed.global_state
    client = state.client
    assert (state.num_processes, count_processes()) == (2, 2)
    client.key_value_set(f"said/{state.process_id}", "hello")
    client.wait_at_barrier("all", 30_000)
    print("joined", state.process_id, len(client.key_value_dir_get("said/")), flush=True)
"""
KUBEFLOW = {"JAX_COORDINATOR_ADDRESS": "localhost:{port}", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "{rank}"}
POD = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JOB_COMPLETION_INDEX": "{rank}",
    "SPMDKIT_JOB_ADDRESSES": "127.0.0.1:{port}",
    "SPMDKIT_NUM_PROCESSES": "2",
}


@pytest.mark.parametrize("variables", [KUBEFLOW, POD], ids=["Kubeflow", "pod"])
def test_reads_job_from_launcher_variables(variables):
    ended = join(variables)
    assert [each.code for each in ended] == [0, 0], [each.stderr for each in ended]
    assert [each.stdout.splitlines()[-1] for each in ended] == ["joined 0 2", "joined 1 2"]
    assert not any("proxy" in each.stderr for each in ended), "no warning where there is nothing to do"


def join(variables: dict[str, str]) -> list[Ended]:
    port = free_port()
    processes = []
    for rank in range(2):
        own = {name: text.format(rank=rank, port=port) for name, text in variables.items()}
        processes.append(begin([sys.executable, "-c", PROGRAM], {"JAX_PLATFORMS": "cpu", **own}))
    return wait(processes)
