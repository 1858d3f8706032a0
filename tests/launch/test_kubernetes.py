"""`--on kubernetes` from the command line, and `kubectl apply`."""

from functools import partial

import pytest
import yaml
from spmdkit.launch.kubernetes import apply
from spmdkit.launch.launchers import find_launcher
from spmdkit.launch.supervision.attempts import NotNow
from spmdkit.mesh.errors import UserError
from support.runs import write_config

LAUNCH = {"kubernetes": {"image": "train:1", "volume_claim": "runs", "namespace": "ml"}, "nodes": 2}


@pytest.fixture
def small(tmp_path):
    return write_config(tmp_path, run={"simulate": 4, "dir": "runs/tiny"}, launch=LAUNCH)


def test_dry_run_prints_the_manifest(small, cli):
    printed = cli(0, "launch", small, "train.steps=3", "--on", "kubernetes", "--restarts", "2", "--dry-run").out
    config_map, jobset = yaml.safe_load_all(printed)
    assert yaml.safe_load(config_map["data"]["config.yaml"])["train"]["steps"] == 3
    assert jobset["kind"] == "JobSet"
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 2


def test_takes_no_argument():
    with pytest.raises(UserError, match="'kubernetes:gpu' is not valid"):
        find_launcher("kubernetes:gpu")


@pytest.mark.parametrize(("root", "in_pod"), [("/shared/code", "/shared/code"), ("/home/me", "/shared")])
def test_root_in_a_pod(root, in_pod, small, cli):
    printed = cli(0, "launch", small, f"run.root={root}", "--on", "kubernetes", "--dry-run").out
    config_map, _ = yaml.safe_load_all(printed)
    assert yaml.safe_load(config_map["data"]["config.yaml"])["run"]["root"] == in_pod


def test_without_kubectl(small, tmp_path, cli, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert "error: kubectl is not installed on this machine" in cli(2, "launch", small, "--on", "kubernetes").err


@pytest.fixture
def kubectl(put_command):
    return partial(put_command, "kubectl", reads=True)


def test_launch_applies_the_manifest(small, kubectl, tmp_path, cli):
    kubectl("configmap/x-1 unchanged\njobset.jobset.x-k8s.io/tiny created\n")
    said = cli(0, "launch", small, "--on", "kubernetes").err
    given = yaml.safe_load_all((tmp_path / "tools" / "given").read_text())
    assert [each["kind"] for each in given] == ["ConfigMap", "JobSet"]
    assert (tmp_path / "tools" / "words").read_text() == "apply -f -\n"
    assert "spmdkit launch: jobset.jobset.x-k8s.io/tiny created\n" in said
    assert "to watch it:    kubectl get jobset tiny --watch --namespace ml\n" in said
    assert "to stop it:     kubectl delete jobset tiny --namespace ml" in said
    kubectl("service/x created\njob.batch/x created\n")
    assert len(apply("", "job", "x")) == 2


CONTROLLER = 'error: resource mapping not found: no matches for kind "JobSet" in version "x"\n'
REFUSED = "E1 memcache.go\nThe connection to the server localhost:8080 was refused: connection refused\n"


@pytest.mark.parametrize(
    ("out", "err", "kind", "error", "message"),
    [
        ("configmap/x-1 unchanged\njobset.jobset.x-k8s.io/x unchanged\n", "", "jobset", UserError,
         r"Nothing was started: .*x unchanged. .* delete .*kubectl delete jobset x"),
        ("", 'The Job "x" is invalid: spec.template: Invalid value: field is immutable\n', "job", UserError,
         r"exit code 1: The Job .*kubectl delete job x"),
        ("", CONTROLLER, "jobset", UserError, r"no JobSet controller: install it, or set launch.kubernetes.form=job"),
        ("", REFUSED, "jobset", NotNow, "The cluster does not answer: The connection to the server"),
    ],
    ids=["unchanged", "immutable", "missing controller", "unavailable cluster"],
)  # fmt: skip
def test_reports_what_kubectl_could_not_do(out, err, kind, error, message, kubectl):
    kubectl(out, err, code=int(bool(err)))
    with pytest.raises(error, match=message):
        apply("", kind, "x")
