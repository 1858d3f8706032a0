"""A checkpoint written on 8 devices (fsdp 8) goes on anywhere, exactly."""

import shutil
from pathlib import Path

import pytest
from support.runs import losses, trained, write_config

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
