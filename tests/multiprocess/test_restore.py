"""A checkpoint written on 8 devices (fsdp 8) goes on anywhere, exactly."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from spmdkit.checkpoints.manager import Checkpoints
from spmdkit.configs import load_config
from spmdkit.layouts.paths import leaves_with_paths
from spmdkit.mesh import DeviceMesh
from spmdkit.parallel import build_step, lay_out
from spmdkit.runtime.build_run import build
from support.runs import assert_same_arrays, losses, state_arrays, trained, write_config

FSDP = {"fsdp": {"size": 8, "floor_bytes": 64}}
WRITTEN, STEPS = 4, 8


def options(**sections) -> dict:
    return {"strategy": FSDP, "optimizer": {"learning_rate": 0.01}, "eval": {"every": 0, "batches": 1}, **sections}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """The config of a run whose first half was trained on 8 devices."""
    config = write_config(tmp_path_factory.mktemp("written"), **options())
    trained("train", config, f"train.steps={WRITTEN}")
    return config


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, written) -> dict[int, float]:
    """The losses of both halves on 8 devices."""
    config = write_config(tmp_path_factory.mktemp("uninterrupted"), **options())
    trained("train", config, f"train.steps={STEPS}")
    return losses(config.parent / "run")


@pytest.mark.long_cases("mesh0")
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 2}, {"data": 1}, {"fsdp": 2}])
def test_fewer_devices_restore_it_exactly(mesh, written):
    expected = state_arrays(written, WRITTEN)
    built = build(load_config(written))
    (size,) = mesh.values()
    layouts = lay_out(built.model, DeviceMesh.of([f"cpu:{index}" for index in range(size)], **mesh), rules=_rules(mesh))
    step = build_step(built.model, built.step.optimizer, layouts)
    folder = written.parent / "run" / "checkpoints"
    with Checkpoints(folder, keep=1, abstract_state=step.abstract_state()) as checkpoints:
        state = checkpoints.restore()
    assert len(state.params["layers"][0]["kernel"].sharding.device_set) == size
    assert_same_arrays({path: np.asarray(leaf) for path, leaf in leaves_with_paths(state)}, expected)


def _rules(mesh: dict[str, int]) -> dict | None:
    return {"layers/0/kernel": [None, "fsdp"]} if "fsdp" in mesh else None


@pytest.mark.long_cases("1 device", "2 processes x 1 device", "2 processes x 4 devices")
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "command",
    [
        ["train", "run.simulate=2", "strategy={data: 2}"],
        ["train", "run.simulate=1", "strategy={data: 1}"],
        ["launch", "--on", "local:2x4"],
        ["launch", "strategy={data: 2}", "--on", "local:2x1"],
    ],
    ids=["2 devices", "1 device", "2 processes x 4 devices", "2 processes x 1 device"],
)
def test_training_resumes(command, written, uninterrupted, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(written.parent / "run", folder)
    name, *rest = command
    printed = trained(name, written, f"run.dir={folder}", f"train.steps={STEPS}", *rest).stdout
    assert f"Resuming {folder} at step {WRITTEN} of {STEPS}." in printed
    assert losses(folder) == pytest.approx(uninterrupted, rel=1e-5)
