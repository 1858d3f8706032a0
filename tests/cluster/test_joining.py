"""What processes find of their job under a real Slurm and a real Open MPI, as `spmdkit doctor` tells it."""

import json
import shutil
import subprocess

import pytest
from support.runs import command, environment, write_config
from support.slurm_lab import running_slurm

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.cluster]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with running_slurm(tmp_path_factory.mktemp("slurm")) as lab:
        yield lab


def findings(ended: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Found -> the variable that says so; nothing may be wrong."""
    assert ended.returncode == 0, ended.stdout + ended.stderr
    values = json.loads(ended.stdout)
    assert values["ok"]
    return {finding["found"]: finding["variable"] for finding in values["findings"]}


def test_tasks_on_two_nodes(slurm, tmp_path):
    config = write_config(tmp_path)
    doctor = command("doctor", config, "--json", "run.simulate=2")
    words = ["srun", "--nodes=2", "--ntasks-per-node=2", "--time=5", *doctor]
    found = findings(slurm.run(*words, timeout=300))
    for rank in range(4):
        assert found[f"process {rank} of 4"] == "SLURM_PROCID, SLURM_STEP_NUM_TASKS"
    assert "process 1 of 2 on its host" in found
    assert any(text.startswith("n1:") and variable == "SLURM_STEP_NODELIST" for text, variable in found.items())
    assert f"all 4 processes see the same {tmp_path}" in found


def test_batch_script_without_srun(slurm, tmp_path):
    config = write_config(tmp_path)
    script = tmp_path / "script"
    script.write_text("\n".join(["#!/bin/sh", " ".join(command("train", config, "run.simulate=4")), ""]))
    output = tmp_path / "output"
    ended = slurm.run("sbatch", "--wait", "--ntasks=2", "--time=5", f"--output={output}", script, timeout=300)
    assert ended.returncode == 2, ended.stderr
    assert "error: Slurm has allocated 2 tasks (SLURM_NTASKS), but this is the batch script" in output.read_text()
    assert not (tmp_path / "run").exists()


def test_open_mpi(tmp_path):
    assert shutil.which("mpirun"), "mpirun missing: run tests/cluster/install as root"
    config = write_config(tmp_path)
    options = ["--allow-run-as-root", "--oversubscribe", "--mca", "oob_tcp_if_include", "lo"]
    words = ["mpirun", "-n", "2", *options, *command("doctor", config, "--json", "run.simulate=4")]
    ended = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300)
    found = findings(ended)
    for rank in range(2):
        assert found[f"process {rank} of 2"] == "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE"
        assert f"process {rank} of 2 on its host" in found
    assert any(text.startswith("127.0.0.1:") for text in found)
