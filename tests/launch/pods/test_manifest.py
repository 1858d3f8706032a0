"""Manifests against the schemas that Kubernetes and JobSet publish, and what they promise a run."""

from dataclasses import replace

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from runs import write_config
from spmdkit.configs import load_config
from spmdkit.launch.places import Run
from spmdkit.launch.pods.manifest import MOST_NAME, deadline, job_name, manifest
from spmdkit.mesh.errors import UserError

VERSIONS = ("1.31", "1.37")
"""Of Kubernetes: with JobSet's conditions of a Job since the one, the newest with published schemas."""
POD = {
    "kubernetes": {"image": "registry.example.org/train:1", "volume_claim": "runs", "queue": "team-a"},
    "nodes": 4,
    "gpus_per_process": 8,
    "cpus_per_process": 16,
    "time": "12:00:00",
    "environment": {"NCCL_DEBUG": "WARN", "PRICE": "$(HOME) 8"},
    "setup": ["ulimit -c 0"],
}
MESH = {"run": {"simulate": 2, "dir": "runs/My Run"}, "strategy": {"data": 8}}


@pytest.fixture
def config(tmp_path):
    """The config of a run of four pods, with changes to the section `launch`."""

    def load(form="jobset", **launch):
        given = {**POD, **launch}
        given["kubernetes"] = {**POD["kubernetes"], "form": form, **launch.get("kubernetes", {})}
        path = write_config(tmp_path, **MESH, launch=given)
        return load_config(path, num_processes=None)

    return load


def written(config, **run) -> list[dict]:
    return list(yaml.safe_load_all(manifest(Run("tiny.yaml", **run), config)))


def validate(found: dict) -> None:
    """Raises where an object is not of the published schema, unknown fields included."""
    if found["kind"] != "JobSet":
        for version in VERSIONS:
            kubernetes_validate.validate(found, version, strict=True)
        return
    model = JobsetV1alpha2JobSet.from_dict(found)
    assert model is not None
    assert model.to_dict() == found, "a field that the schema does not know is dropped"
    for group in found["spec"]["replicatedJobs"]:
        validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": found["metadata"], **group["template"]})


@pytest.mark.parametrize("form", ["jobset", "job"])
@pytest.mark.parametrize("launch", [{}, {"gpus_per_process": 0, "cpus_per_process": 0, "time": "", "setup": []}])
def test_every_object_is_of_the_published_schema(form, launch, config):
    found = written(config(form, **launch), restarts=2)
    kinds = {"jobset": ["ConfigMap", "JobSet"], "job": ["ConfigMap", "Service", "Job"]}
    assert [each["kind"] for each in found] == kinds[form]
    for each in found:
        validate(each)


@pytest.mark.parametrize("form", ["jobset", "job"])
def test_a_misspelt_field_would_be_found(form, config):
    found = written(config(form))[-1]
    found["spec"]["backofLimit"] = 1
    with pytest.raises((AssertionError, kubernetes_validate.ValidationError)):
        validate(found)
    found = written(config("jobset"))[-1]
    found["spec"]["replicatedJobs"][0]["template"]["spec"]["completionMod"] = "Indexed"
    with pytest.raises((AssertionError, kubernetes_validate.ValidationError)):
        validate(found)


def job_spec(found: list[dict]) -> dict:
    spec = found[-1]["spec"]
    return spec["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in spec else spec


def container(found: list[dict]) -> dict:
    (only,) = job_spec(found)["template"]["spec"]["containers"]
    return only


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


def test_names_of_pods_come_from_the_service(config):
    found = written(config("job"))
    service, job = found[1], found[2]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]


@pytest.mark.parametrize("form", ["jobset", "job"])
def test_what_follows_the_end_of_a_pod(form, config):
    found = written(config(form), restarts=3)
    spec = job_spec(found)
    rules = spec["podFailurePolicy"]["rules"]
    assert [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in rules] == [
        ("FailJob", [2, 3]),
        ("Ignore", [75]),
        ("Ignore", None),
    ]
    assert rules[2]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == 120 + 30
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (4, 4, "Indexed")
    assert spec["activeDeadlineSeconds"] == 12 * 3600
    if form == "jobset":
        assert spec["backoffLimit"] == 0
        assert found[-1]["spec"]["failurePolicy"]["maxRestarts"] == 3
        assert found[-1]["spec"]["failurePolicy"]["rules"][0]["action"] == "FailJobSet"
    else:
        assert spec["backoffLimit"] == 3 * 4, "one incident may end every pod"


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


def test_queue_and_namespace(config):
    found = written(config(kubernetes={"namespace": "ml"}))
    assert {each["metadata"]["namespace"] for each in found} == {"ml"}
    assert found[-1]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert "kueue.x-k8s.io/queue-name" not in found[0]["metadata"]["labels"]
    assert "namespace" not in written(config())[0]["metadata"]


def test_names_fit(config, tmp_path):
    assert job_name(config()) == "my-run"
    long = load_config(tmp_path / "tiny.yaml", [f"run.dir={'x' * 100}"], num_processes=None)
    assert len(job_name(long)) == MOST_NAME
    assert job_name(config(kubernetes={"name": "seven"})) == "seven"
    label = f"{job_name(long)}-host-0-0.{job_name(long)}"
    assert len(label) <= 63, "JobSet's label of the coordinator"


WRONG = {
    "image": ({"kubernetes": {"image": ""}}, "launch.kubernetes.image='' must name a container image"),
    "claim": ({"kubernetes": {"volume_claim": ""}}, "launch.kubernetes.volume_claim must name a PersistentVolumeClaim"),
    "name": ({"kubernetes": {"name": "My_Run"}}, "launch.kubernetes.name='My_Run' must be a label .* such as 'my-run'"),
    "namespace": ({"kubernetes": {"namespace": "a b"}}, "launch.kubernetes.namespace='a b' is no name"),
    "mount": ({"kubernetes": {"mount": "shared"}}, "launch.kubernetes.mount='shared' must be a folder"),
    "config's folder": ({"kubernetes": {"mount": "/config"}}, "launch.kubernetes.mount='/config' must be a folder"),
    "processes": (
        {"nodes": 1, "processes_per_node": 4, "gpus_per_process": 2},
        "launch.processes_per_node=4, but a pod holds one process, .* launch.gpus_per_process=8",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_launched(case, config):
    changed, message = WRONG[case]
    with pytest.raises(UserError, match=message):
        written(config(**changed))


def test_everything_wrong_at_once(config, tmp_path):
    config(kubernetes={"image": "", "volume_claim": ""})
    outside = load_config(tmp_path / "tiny.yaml", ["run.dir=/scratch/x"], num_processes=None)
    with pytest.raises(UserError) as raised:
        manifest(Run("tiny.yaml", fresh=True), outside)
    lines = str(raised.value).splitlines()
    assert len(lines) == 5
    assert "run.dir=/scratch/x is not below launch.kubernetes.mount=/shared" in lines[3]
    assert "--fresh would start anew with every pod that comes again." in lines[4]


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("12:00:00", 43200), ("90", 5400), ("1:30", 90), ("1-12:00:00", 129600), ("2-0", 172800), ("0:0:0", None)],
)
def test_time_limits(time, seconds):
    assert deadline(time) == seconds


def test_no_time_limit():
    assert deadline("") is None
    assert deadline("soon") is None
