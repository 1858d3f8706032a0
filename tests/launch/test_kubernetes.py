"""`--on kubernetes` from the command line, and `kubectl apply`."""

from functools import partial

import pytest
import yaml
from spmdkit.launch.cli import main
from spmdkit.launch.kubernetes import apply
from spmdkit.launch.supervision.attempts import NotNow
from spmdkit.mesh.errors import UserError
from support.runs import write_config

LAUNCH = {"kubernetes": {"image": "train:1", "volume_claim": "runs", "namespace": "ml"}, "nodes": 2}


@pytest.fixture
def small(tmp_path):
    return write_config(tmp_path, run={"simulate": 4, "dir": "runs/tiny"}, launch=LAUNCH)


def test_dry_run_prints_the_manifest(small, capsys):
    assert main(["launch", str(small), "train.steps=3", "--on", "kubernetes", "--restarts", "2", "--dry-run"]) == 0
    config_map, jobset = yaml.safe_load_all(capsys.readouterr().out)
    assert yaml.safe_load(config_map["data"]["config.yaml"])["train"]["steps"] == 3
    assert jobset["kind"] == "JobSet"
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 2


@pytest.mark.parametrize(("root", "in_pod"), [("/shared/code", "/shared/code"), ("/home/me", "/shared")])
def test_root_in_a_pod(root, in_pod, small, capsys):
    assert main(["launch", str(small), f"run.root={root}", "--on", "kubernetes", "--dry-run"]) == 0
    config_map, _ = yaml.safe_load_all(capsys.readouterr().out)
    assert yaml.safe_load(config_map["data"]["config.yaml"])["run"]["root"] == in_pod


def test_without_kubectl(small, tmp_path, cli, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert "error: kubectl is not installed on this machine" in cli(2, "launch", small, "--on", "kubernetes").err


@pytest.fixture
def kubectl(put_command):
    return partial(put_command, "kubectl", reads=True)


def test_launch_applies_the_manifest(small, kubectl, tmp_path, capsys):
    kubectl("configmap/x-1 unchanged\njobset.jobset.x-k8s.io/tiny created\n")
    assert main(["launch", str(small), "--on", "kubernetes"]) == 0
    given = yaml.safe_load_all((tmp_path / "tools" / "given").read_text())
    assert [each["kind"] for each in given] == ["ConfigMap", "JobSet"]
    assert (tmp_path / "tools" / "words").read_text() == "apply -f -\n"
    said = capsys.readouterr().err
    assert "spmdkit launch: jobset.jobset.x-k8s.io/tiny created\n" in said
    assert "to watch it:    kubectl get jobset tiny --watch --namespace ml\n" in said
    assert "to stop it:     kubectl delete jobset tiny --namespace ml" in said
    kubectl("service/x created\njob.batch/x created\n")
    assert len(apply("", "job", "x")) == 2


def test_rejects_an_existing_job(kubectl):
    kubectl("configmap/x-1 unchanged\njobset.jobset.x-k8s.io/x unchanged\n")
    with pytest.raises(UserError, match=r"Nothing was started: .*x unchanged. .* delete .*kubectl delete jobset x"):
        apply("", "jobset", "x")
    kubectl(err='The Job "x" is invalid: spec.template: Invalid value: field is immutable\n', code=1)
    with pytest.raises(UserError, match=r"exit code 1: The Job .*kubectl delete job x"):
        apply("", "job", "x")


def test_names_a_missing_controller(kubectl):
    kubectl(err='error: resource mapping not found: no matches for kind "JobSet" in version "x"\n', code=1)
    with pytest.raises(UserError, match=r"no JobSet controller: install it, or set launch.kubernetes.form=job"):
        apply("", "jobset", "x")


def test_unavailable_cluster_means_try_again(kubectl):
    kubectl(err="E1 memcache.go\nThe connection to the server localhost:8080 was refused: connection refused\n", code=1)
    with pytest.raises(NotNow, match="The cluster does not answer: The connection to the server"):
        apply("", "jobset", "x")
