"""What cannot be launched on Kubernetes is told, all of it at once; time limits are read as other schedulers do."""

import pytest
from pod_manifests import written
from spmdkit.configs import load_config
from spmdkit.launch.places import Run
from spmdkit.launch.pods.manifest import manifest
from spmdkit.launch.pods.problems import deadline
from spmdkit.mesh.errors import UserError

WRONG = {
    "image": ({"kubernetes": {"image": ""}}, "launch.kubernetes.image='' must name a container image"),
    "claim": ({"kubernetes": {"volume_claim": ""}}, "launch.kubernetes.volume_claim must name a PersistentVolumeClaim"),
    "name": ({"kubernetes": {"name": "My_Run"}}, "launch.kubernetes.name='My_Run' must be a label .* such as 'my-run'"),
    "namespace": ({"kubernetes": {"namespace": "a b"}}, "launch.kubernetes.namespace='a b' is no name"),
    "mount": ({"kubernetes": {"mount": "shared"}}, "launch.kubernetes.mount='shared' must be a folder"),
    "config's folder": ({"kubernetes": {"mount": "/config"}}, "launch.kubernetes.mount='/config' must be a folder"),
    "memory": ({"kubernetes": {"memory": "64"}}, "launch.kubernetes.memory='64' must be a number with a unit"),
    "secrets": ({"kubernetes": {"secrets": ["A b"]}}, "launch.kubernetes.secrets='A b' is no name"),
    "account": ({"kubernetes": {"service_account": "A"}}, "launch.kubernetes.service_account='A' is no name"),
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
