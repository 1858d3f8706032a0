"""Kubernetes manifests: their schemas, pods, names, and problems of the config."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
from spmdkit.configs import load_config
from spmdkit.launch.launchers import LaunchJob, LaunchRequest
from spmdkit.launch.manifest import RULES, job_name, make_label, parse_time_limit
from spmdkit.mesh.errors import UserError
from support.launch_cases import container, job_spec, written

IDS = {"user": 1000, "group": 2000}
EVERYTHING = {"kubernetes": {"memory": "64Gi", "secrets": ["hub"], "service_account": "train", **IDS}}
VERSIONS = ("1.31", "1.37")
"""Of Kubernetes: with JobSet's conditions of a Job since the one, the newest with published schemas."""


def closed(schema: dict) -> dict:
    """Returns a schema that rejects the fields it does not list, which the API server would drop."""
    found = {key: closed(value) if key in ("items", "additionalProperties") else value for key, value in schema.items()}
    if "properties" in schema:
        found["properties"] = {name: closed(value) for name, value in schema["properties"].items()}
        found["additionalProperties"] = False
    return found


JOBSET = closed(json.loads((Path(__file__).parents[1] / "support/jobset_schema.json").read_text()))
JOBSET["properties"]["metadata"] = {"type": "object"}


def validate(found: dict) -> None:
    """Raises where an object is not of the published schema, unknown fields included."""
    if found["kind"] != "JobSet":
        for version in VERSIONS:
            kubernetes_validate.validate(found, version, strict=True)
        return
    jsonschema.Draft202012Validator(JOBSET).validate(found)
    for group in found["spec"]["replicatedJobs"]:
        validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": found["metadata"], **group["template"]})


@pytest.mark.parametrize("form", ["jobset", "job"])
@pytest.mark.parametrize(
    "launch", [EVERYTHING, {}, {"gpus_per_process": 0, "cpus_per_process": 0, "time": "", "setup": []}]
)
def test_objects_match_the_published_schemas(form, launch, config):
    found = written(config(form, **launch), restarts=2)
    kinds = {"jobset": ["ConfigMap", "JobSet"], "job": ["ConfigMap", "Service", "Job"]}
    assert [each["kind"] for each in found] == kinds[form]
    for each in found:
        validate(each)


@pytest.mark.parametrize("form", ["jobset", "job"])
def test_policies_after_the_end_of_a_pod(form, config):
    found = written(config(form), restarts=3)
    spec = job_spec(found)
    rules = spec["podFailurePolicy"]["rules"]
    actions = [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in rules]
    assert actions == [("FailJob", [2, 3]), ("Ignore", None)], "75 is counted: a full disk ends with it"
    assert rules[1]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
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


def test_queue_and_namespace(config):
    found = written(config(kubernetes={"namespace": "ml"}))
    assert {each["metadata"]["namespace"] for each in found} == {"ml"}
    assert found[-1]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert "kueue.x-k8s.io/queue-name" not in found[0]["metadata"]["labels"]
    assert "namespace" not in written(config())[0]["metadata"]


@pytest.mark.parametrize("form", ["jobset", "job"])
def test_limits_restarts_and_time_by_default(form, config):
    found = written(config(form, time=""))
    spec = job_spec(found)
    assert spec["activeDeadlineSeconds"] == 7 * 24 * 3600
    limit = found[-1]["spec"]["failurePolicy"]["maxRestarts"] if form == "jobset" else spec["backoffLimit"]
    assert limit == {"jobset": 6, "job": 6 * 4}[form]
    fewer = written(config(form, kubernetes={"restarts": 1}))
    limits = (fewer[-1]["spec"].get("failurePolicy", {}).get("maxRestarts"), job_spec(fewer)["backoffLimit"])
    assert limits == ((1, 0) if form == "jobset" else (None, 4))


@pytest.mark.parametrize("form", ["jobset", "job"])
def test_pods_have_minimal_rights(form, config):
    found = written(config(form))
    pod = job_spec(found)["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in pod
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    limited = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert container(found)["securityContext"] == {**limited, "readOnlyRootFilesystem": True}
    writable = written(config(form, kubernetes={"read_only": False}))
    assert container(writable)["securityContext"] == limited


def test_read_only_image_has_a_directory_for_temporary_files(config):
    found = written(config())
    assert {"name": "temporary", "mountPath": "/tmp"} in container(found)["volumeMounts"]
    assert {"name": "temporary", "emptyDir": {}} in job_spec(found)["template"]["spec"]["volumes"]
    assert {"name": "XDG_CACHE_HOME", "value": "/tmp"} in container(found)["env"]
    writable = written(config(kubernetes={"read_only": False}))
    assert "/tmp" not in {each["mountPath"] for each in container(writable)["volumeMounts"]}
    mine = written(config(environment={"XDG_CACHE_HOME": "/shared/cache"}))
    assert [each["value"] for each in container(mine)["env"] if each["name"] == "XDG_CACHE_HOME"] == ["/shared/cache"]


@pytest.mark.parametrize("form", ["jobset", "job"])
def test_ended_job_is_removed_after_a_week(form, config):
    assert written(config(form))[-1]["spec"]["ttlSecondsAfterFinished"] == 7 * 24 * 3600
    assert "ttlSecondsAfterFinished" not in written(config(form, kubernetes={"keep_seconds": 0}))[-1]["spec"]


@pytest.mark.parametrize(
    ("launch", "requests"),
    [
        ({"gpus_per_process": 0, "cpus_per_process": 0}, {"cpu": "1", "memory": "4Gi"}),
        ({"gpus_per_process": 8, "cpus_per_process": 0}, {"cpu": "8", "memory": "32Gi"}),
        ({"gpus_per_process": 8, "kubernetes": {"memory": "900Gi"}}, {"cpu": "16", "memory": "900Gi"}),
    ],
)
def test_every_pod_requests_cpu_and_memory(launch, requests, config):
    assert container(written(config(**launch)))["resources"]["requests"] == requests


def test_memory_secrets_account_and_ids(config):
    found = written(config(**EVERYTHING))
    pod, only = job_spec(found)["template"]["spec"], container(found)
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("train", False)
    assert pod["securityContext"]["runAsUser"] == 1000
    assert (pod["securityContext"]["runAsGroup"], pod["securityContext"]["fsGroup"]) == (2000, 2000)
    assert only["resources"]["requests"] == {"cpu": "16", "memory": "64Gi"}
    assert only["resources"]["limits"] == {"nvidia.com/gpu": "8", "memory": "64Gi"}
    assert only["envFrom"] == [{"secretRef": {"name": "hub"}}]


def test_secrets_are_not_written_to_the_manifest(config):
    given = {"HF_TOKEN": "hf_abc", "NCCL_DEBUG": "WARN"}
    with pytest.raises(UserError, match=r"HF_TOKEN must come from a Secret, .* create secret generic") as raised:
        written(config(environment=given))
    assert "hf_abc" not in str(raised.value)
    found = written(config(environment=given, kubernetes={"secrets": ["hub"]}))
    assert "hf_abc" not in str(found)
    names = [each["name"] for each in container(found)["env"]]
    assert "NCCL_DEBUG" in names
    assert "HF_TOKEN" not in names


def variables(found: list[dict]) -> dict:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container(found)["env"]}


def test_variables_of_a_pod(config):
    _, service, job = written(config("job"))
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    found = variables([job])
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
    assert container(found)["resources"] == {
        "requests": {"cpu": "16", "memory": "32Gi"},
        "limits": {"nvidia.com/gpu": "8"},
    }
    mounts = {each["mountPath"]: each["name"] for each in container(found)["volumeMounts"]}
    assert set(mounts) == {"/config", "/shared", "/dev/shm", "/tmp"}
    volumes = {each["name"]: each for each in job_spec(found)["template"]["spec"]["volumes"]}
    assert volumes[mounts["/shared"]]["persistentVolumeClaim"] == {"claimName": "runs"}
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}
    assert volumes[mounts["/config"]]["configMap"]["name"] == found[0]["metadata"]["name"]
    plain = written(config(gpus_per_process=0, cpus_per_process=0))
    assert "limits" not in container(plain)["resources"]
    assert "/dev/shm" not in str(plain)


def test_command_of_a_pod(config):
    train = ["python", "-P", "-m", "spmdkit", "train", "/config/config.yaml"]
    assert container(written(config(setup=[])))["command"] == train
    with_setup = container(written(config(python="/venv/bin/python")))["command"]
    assert with_setup == ["bash", "-e", "-c", 'ulimit -c 0\nexec "$@"', "bash", "/venv/bin/python", *train[1:]]


def test_config_map_contains_the_whole_config(config, tmp_path):
    given = load_config(config(), num_processes=None)
    (text,) = written(config())[0]["data"].values()
    path = tmp_path / "there.yaml"
    path.write_text(text)
    there = load_config(path, num_processes=4)
    assert (there.run.dir, there.run.root) == ("/shared/runs/My Run", "/shared")
    assert replace(there, run=given.run) == given
    one, same, other = (written(config(environment={"A": value}))[0]["metadata"]["name"] for value in "112")
    assert one == same != other, "another config has another map, so a running job keeps its own"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kubernetes": {"mount": "/config"}}, "kubernetes.mount='/config' must be an absolute"),
        ({"kubernetes": {"mount": "/a/../b"}}, "kubernetes.mount='/a/../b' must be an absolute"),
        ({"kubernetes": {"memory": "64"}}, "launch.kubernetes.memory='64' must be a number with a unit"),
        ({"kubernetes": {"secrets": ["A b"]}}, "launch.kubernetes.secrets='A b' is not a valid name"),
        ({"kubernetes": {"service_account": "A"}}, "launch.kubernetes.service_account='A' is not a valid name"),
        (
            {"nodes": 1, "processes_per_node": 4, "gpus_per_process": 2},
            "launch.processes_per_node=4, but a pod contains one process, .* launch.gpus_per_process=8",
        ),
    ],
)
def test_rejects_invalid_configs(changed, message, config):
    with pytest.raises(UserError, match=message):
        written(config(**changed))


def test_reports_all_problems_at_once(config, tmp_path):
    path = config(kubernetes={"image": "", "volume_claim": ""})
    with pytest.raises(UserError) as raised:
        written(path, "run.dir=/scratch/x", fresh=True)
    lines = str(raised.value).splitlines()
    assert len(lines) == 5
    assert "run.dir=/scratch/x is not below launch.kubernetes.mount=/shared" in lines[3]
    assert "--fresh would start anew with every recreated pod." in lines[4]


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("12:00:00", 43200), ("90", 5400), ("1:30", 90), ("1-12:00:00", 129600), ("2-0", 172800), ("12-6:30", 1060200)],
)
def test_time_limits(time, seconds):
    assert parse_time_limit(time) == seconds


@pytest.mark.parametrize(
    ("text", "label"),
    [("run", "run"), ("My Run_2", "my-run-2"), ("7b.fsdp", "run-7b-fsdp"), ("--", "run"), ("a" * 26, "a" * 26)],
)
def test_make_label(text, label):
    assert make_label(text, 26) == label
    assert re.fullmatch(RULES["name"][0], label)
    one, other = (make_label("a-very-long-name-of-a-run-" + end, 26) for end in ("one", "two"))
    assert one != other
    assert len(one) == len(other) == 26


@pytest.mark.parametrize(
    ("key", "valid", "invalid"),
    [
        ("name", ["a", "a" * 26], ["", "7b", "a-", "-a", "A", "a.b", "a" * 27]),
        ("namespace", ["7b", "a" * 63], ["a-", "a.b", "a" * 64]),
        ("queue", ["team-a.example.org"], ["A", ".a", "a/b"]),
    ],
)
def test_rules_of_names(key, valid, invalid):
    pattern, _ = RULES[key]
    assert all(re.fullmatch(pattern, text) for text in valid)
    assert not any(re.fullmatch(pattern, text) for text in invalid)


@pytest.mark.parametrize(
    ("given", "overrides", "name"),
    [({}, [], "my-run"), ({}, [f"run.dir={'x' * 100}"], "x{19}-.{6}"), ({"name": "seven"}, [], "seven")],
)
def test_names_of_jobs_fit_into_labels(given, overrides, name, config):
    found = job_name(LaunchJob.load(LaunchRequest(str(config(kubernetes=given)), tuple(overrides))))
    assert re.fullmatch(name, found)
    assert len(f"{found}-host-0-0.{found}") <= 63, "JobSet's label of the coordinator"
