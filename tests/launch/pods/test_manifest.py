"""Manifests against the schemas that Kubernetes and JobSet publish, and what they promise a run."""

import kubernetes_validate
import pytest
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from pod_manifests import job_spec, written

VERSIONS = ("1.31", "1.37")
"""Of Kubernetes: with JobSet's conditions of a Job since the one, the newest with published schemas."""


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


def test_queue_and_namespace(config):
    found = written(config(kubernetes={"namespace": "ml"}))
    assert {each["metadata"]["namespace"] for each in found} == {"ml"}
    assert found[-1]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert "kueue.x-k8s.io/queue-name" not in found[0]["metadata"]["labels"]
    assert "namespace" not in written(config())[0]["metadata"]
