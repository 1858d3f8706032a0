"""What is made of what kubectl says. A script of that name stands for it: a cluster is not part of the tests."""

import os

import pytest
from spmdkit.launch.pods.kubectl import ClusterUnavailable, apply
from spmdkit.mesh.errors import UserError


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """Puts a kubectl first on PATH that keeps what it is given, prints a text and ends with a code."""

    def write(out: str = "", err: str = "", code: int = 0) -> None:
        (tmp_path / "out").write_text(out)
        (tmp_path / "err").write_text(err)
        path = tmp_path / "kubectl"
        path.write_text(
            f'#!/bin/sh\ncat > {tmp_path}/given; echo "$@" > {tmp_path}/words\n'
            f"cat {tmp_path}/out; cat {tmp_path}/err >&2; exit {code}\n"
        )
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return write


def test_it_is_handed_over(kubectl, tmp_path):
    kubectl("configmap/x-1 unchanged\njobset.jobset.x-k8s.io/x created\n")
    assert apply("kind: JobSet\n", "jobset", "x")[1] == "jobset.jobset.x-k8s.io/x created"
    assert (tmp_path / "given").read_text() == "kind: JobSet\n"
    assert (tmp_path / "words").read_text() == "apply -f -\n"
    kubectl("service/x created\njob.batch/x created\n")
    assert len(apply("", "job", "x")) == 2


def test_a_job_that_is_there_already_is_not_taken_for_a_new_one(kubectl):
    kubectl("configmap/x-1 unchanged\njobset.jobset.x-k8s.io/x unchanged\n")
    with pytest.raises(
        UserError, match=r"Nothing was started: .*x unchanged. .* remove the old .*kubectl delete jobset x"
    ):
        apply("", "jobset", "x")
    kubectl(err='The Job "x" is invalid: spec.template: Invalid value: field is immutable\n', code=1)
    with pytest.raises(UserError, match=r"exit code 1: The Job .*kubectl delete job x"):
        apply("", "job", "x")


def test_no_controller(kubectl):
    kubectl(err='error: resource mapping not found: no matches for kind "JobSet" in version "x"\n', code=1)
    with pytest.raises(UserError, match=r"no JobSet controller: install it, or set launch.kubernetes.form=job"):
        apply("", "jobset", "x")


def test_no_cluster(kubectl):
    kubectl(err="E1 memcache.go\nThe connection to the server localhost:8080 was refused: connection refused\n", code=1)
    with pytest.raises(ClusterUnavailable, match="The cluster does not answer: The connection to the server") as raised:
        apply("", "jobset", "x")
    assert raised.value.exit_code == 75


def test_no_kubectl(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"There is no kubectl on this machine .* --dry-run"):
        apply("", "jobset", "x")
