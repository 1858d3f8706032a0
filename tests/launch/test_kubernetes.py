"""`--on kubernetes` from the command line; what the manifest holds is in pods/."""

import pytest
import yaml
from runs import write_config
from spmdkit.launch.cli import main
from spmdkit.launch.places import find_place
from spmdkit.mesh.errors import UserError

LAUNCH = {"kubernetes": {"image": "train:1", "volume_claim": "runs", "namespace": "ml"}, "nodes": 2}


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path, run={"simulate": 4, "dir": "runs/tiny"}, launch=LAUNCH)


def test_a_dry_run_prints_the_manifest(config, capsys):
    assert main(["launch", str(config), "train.steps=3", "--on", "kubernetes", "--restarts", "2", "--dry-run"]) == 0
    config_map, jobset = yaml.safe_load_all(capsys.readouterr().out)
    assert yaml.safe_load(config_map["data"]["config.yaml"])["train"]["steps"] == 3
    assert jobset["kind"] == "JobSet"
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 2


def test_it_is_handed_to_kubectl(config, tmp_path, capsys, monkeypatch):
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f"#!/bin/sh\ncat > {tmp_path}/given\necho jobset.jobset.x-k8s.io/tiny created\n")
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert main(["launch", str(config), "--on", "kubernetes"]) == 0
    assert [each["kind"] for each in yaml.safe_load_all((tmp_path / "given").read_text())] == ["ConfigMap", "JobSet"]
    said = capsys.readouterr().err
    assert "spmdkit launch: jobset.jobset.x-k8s.io/tiny created\n" in said
    assert "to watch it:    kubectl get jobset tiny --watch --namespace ml\n" in said
    assert "to stop it:     kubectl delete jobset tiny --namespace ml" in said


def test_without_kubectl(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert main(["launch", str(config), "--on", "kubernetes"]) == 2
    assert "error: There is no kubectl on this machine" in capsys.readouterr().err


def test_sizes_are_those_of_the_section_launch(config, capsys):
    assert main(["launch", str(config), "launch.nodes=4", "--on", "kubernetes", "--dry-run"]) == 2
    assert "4 processes with 4 devices each give 16" in capsys.readouterr().err


def test_nothing_follows_its_name():
    with pytest.raises(UserError, match="--on 'kubernetes:x' is not a target; give kubernetes: pods"):
        find_place("kubernetes:x")
