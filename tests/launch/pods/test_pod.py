"""One pod: its variables, its command, its devices and volumes, and the config that it reads."""

from dataclasses import replace

from pod_manifests import container, job_spec, written
from spmdkit.configs import load_config


def variables(found: list[dict]) -> dict:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container(found)["env"]}


def test_every_pod_is_told_its_job(config):
    found = variables(written(config("job")))
    assert found["SPMDKIT_COORDINATOR"] == "my-run-0.my-run"
    assert found["SPMDKIT_JOB_ADDRESSES"] == "$(SPMDKIT_COORDINATOR):8476"
    assert found["SPMDKIT_NUM_PROCESSES"] == "4"
    assert (found["NCCL_DEBUG"], found["PRICE"]) == ("WARN", "$$(HOME) 8")
    assert list(found).index("SPMDKIT_COORDINATOR") < list(found).index("SPMDKIT_JOB_ADDRESSES"), "it refers back"
    jobset = variables(written(config()))
    path = jobset["SPMDKIT_COORDINATOR"]["fieldRef"]["fieldPath"]
    assert path == "metadata.annotations['jobset.sigs.k8s.io/coordinator']"
    assert "JOB_COMPLETION_INDEX" not in jobset, "it is the cluster's to give"


def test_gpus_memory_and_volumes(config):
    found = written(config())
    assert container(found)["resources"] == {"requests": {"cpu": "16"}, "limits": {"nvidia.com/gpu": "8"}}
    mounts = {each["mountPath"]: each["name"] for each in container(found)["volumeMounts"]}
    assert set(mounts) == {"/config", "/shared", "/dev/shm"}
    volumes = {each["name"]: each for each in job_spec(found)["template"]["spec"]["volumes"]}
    assert volumes[mounts["/shared"]]["persistentVolumeClaim"] == {"claimName": "runs"}
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}
    assert volumes[mounts["/config"]]["configMap"]["name"] == found[0]["metadata"]["name"]
    plain = written(config(gpus_per_process=0, cpus_per_process=0))
    assert "resources" not in container(plain)
    assert "/dev/shm" not in str(plain)


def test_the_command(config):
    train = ["python", "-P", "-m", "spmdkit", "train", "/config/config.yaml"]
    assert container(written(config(setup=[])))["command"] == train
    with_setup = container(written(config(python="/venv/bin/python")))["command"]
    assert with_setup == ["bash", "-e", "-c", 'ulimit -c 0\nexec "$@"', "bash", "/venv/bin/python", *train[1:]]


def test_the_config_travels_whole(config, tmp_path):
    given = config()
    (text,) = written(given)[0]["data"].values()
    path = tmp_path / "there.yaml"
    path.write_text(text)
    there = load_config(path, num_processes=4)
    assert (there.run.dir, there.run.root) == ("/shared/runs/My Run", "/shared")
    assert replace(there, run=given.run) == given


def test_another_config_makes_another_config_map(config):
    one, same, other = (written(config(environment={"A": value}))[0]["metadata"]["name"] for value in "112")
    assert one == same != other
    assert written(config())[0]["immutable"] is True
