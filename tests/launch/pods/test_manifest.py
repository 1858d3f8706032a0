"""Manifests against the schemas that Kubernetes and JobSet publish, and what they promise a run."""

import json
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
from pod_manifests import container, job_spec, written
from spmdkit.mesh.errors import UserError

EVERYTHING = {
    "kubernetes": {"memory": "64Gi", "secrets": ["hub"], "service_account": "train", "user": 1000, "group": 2000}
}
VERSIONS = ("1.31", "1.37")
"""Of Kubernetes: with JobSet's conditions of a Job since the one, the newest with published schemas."""


def closed(schema: dict) -> dict:
    """Returns a schema that rejects the fields it does not list, which the API server would drop."""
    found = {key: closed(value) if key in ("items", "additionalProperties") else value for key, value in schema.items()}
    if "properties" in schema:
        found["properties"] = {name: closed(value) for name, value in schema["properties"].items()}
        found["additionalProperties"] = False
    return found


JOBSET = closed(json.loads((Path(__file__).parent / "jobset_schema.json").read_text()))
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
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        validate(found)
    found = written(config("jobset"))[-1]
    found["spec"]["replicatedJobs"][0]["template"]["spec"]["completionMod"] = "Indexed"
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        validate(found)


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
        ("Ignore", None),
    ], "75 is counted: a full disk ends with it"
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
    assert (fewer[-1]["spec"].get("failurePolicy", {}).get("maxRestarts"), job_spec(fewer)["backoffLimit"]) == (
        (1, 0) if form == "jobset" else (None, 4)
    )


@pytest.mark.parametrize("form", ["jobset", "job"])
def test_pods_have_no_rights_that_they_do_not_need(form, config):
    found = written(config(form))
    pod = job_spec(found)["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in pod
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert container(found)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


def test_memory_secrets_account_and_ids(config):
    found = written(config(**EVERYTHING))
    pod, only = job_spec(found)["template"]["spec"], container(found)
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("train", False)
    assert pod["securityContext"]["runAsUser"] == 1000
    assert (pod["securityContext"]["runAsGroup"], pod["securityContext"]["fsGroup"]) == (2000, 2000)
    assert only["resources"] == {
        "requests": {"cpu": "16", "memory": "64Gi"},
        "limits": {"nvidia.com/gpu": "8", "memory": "64Gi"},
    }
    assert only["envFrom"] == [{"secretRef": {"name": "hub"}}]


def test_secrets_come_from_secrets_alone(config):
    given = {"HF_TOKEN": "hf_abc", "NCCL_DEBUG": "WARN"}
    with pytest.raises(UserError, match=r"HF_TOKEN must come from a Secret, .* create secret generic") as raised:
        written(config(environment=given))
    assert "hf_abc" not in str(raised.value)
    found = written(config(environment=given, kubernetes={"secrets": ["hub"]}))
    assert "hf_abc" not in str(found)
    names = [each["name"] for each in container(found)["env"]]
    assert "NCCL_DEBUG" in names
    assert "HF_TOKEN" not in names
