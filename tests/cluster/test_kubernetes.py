"""What a manifest gives its pods is enough for a run: its command and variables, given to processes here.

A live cluster is not part of the tests: each process stands for a pod, and what Kubernetes itself would do for it, the
mounts, the name of the first pod and the index, is done by hand.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from spmdkit.launch.supervision.workers import free_port
from support.processes import begin
from support.runs import metrics, spmdkit, trained, write_config

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.multiprocess]


def pods(objects: list[dict], folder: Path) -> list[subprocess.Popen[str]]:
    """Starts the processes of all pods."""
    config_map, job = objects[0], objects[-1]["spec"]
    job = job["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in job else job
    (container,) = job["template"]["spec"]["containers"]
    (folder / "config.yaml").write_text(config_map["data"]["config.yaml"])
    words = [
        sys.executable if word == "python" else word.replace("/config/", f"{folder}/") for word in container["command"]
    ]
    given = {each["name"]: each.get("value", "127.0.0.1") for each in container["env"]}
    given["SPMDKIT_COORDINATOR"] = "127.0.0.1"
    address = given["SPMDKIT_JOB_ADDRESSES"].replace("$(SPMDKIT_COORDINATOR)", given["SPMDKIT_COORDINATOR"])
    given["SPMDKIT_JOB_ADDRESSES"] = address.replace(":8476", f":{free_port()}")
    indices = [{"JOB_COMPLETION_INDEX": str(index)} for index in range(job["completions"])]
    options = {"cwd": container["workingDir"], "stderr": subprocess.STDOUT}
    return [begin(words, {**given, **index}, **options) for index in indices]


@pytest.mark.parametrize("form", ["jobset", "job"])
def test_losses_match_local_processes(form, tmp_path):
    here = write_config(tmp_path / "here")
    trained("launch", here, "--on", "local:2x4")
    wanted = {"image": "train:1", "volume_claim": "runs", "mount": str(tmp_path / "there"), "form": form}
    config = write_config(
        tmp_path / "there", run={"simulate": 4, "log_every": 1, "dir": "run"}, launch={"nodes": 2, "kubernetes": wanted}
    )
    printed = spmdkit("launch", config, "--on", "kubernetes", "--dry-run").stdout
    processes = pods(list(yaml.safe_load_all(printed)), tmp_path / "there")
    said = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert metrics(tmp_path / "there" / "run") == metrics(tmp_path / "here" / "run")
