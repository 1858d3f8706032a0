"""Checkpoints on disk."""

import shutil
from pathlib import Path

import pytest
from spmdkit.checkpoints.restore import StoredCheckpoint
from support.checkpoint_states import host_state, run_state, write


@pytest.fixture
def written(tmp_path):
    """A folder with checkpoints of steps 10 and 20, written on fsdp=8."""
    return write(tmp_path, host_state(10), host_state(20), about=None) / "checkpoints"


@pytest.fixture(scope="session")
def original(tmp_path_factory) -> Path:
    """The folder of a run with checkpoints of steps 10, 20 and 30; not to be changed."""
    states = map(run_state, (10, 20, 30))
    return write(tmp_path_factory.mktemp("original") / "run", *states)


@pytest.fixture
def run(original, tmp_path) -> Path:
    """A copy of it."""
    return shutil.copytree(original, tmp_path / "run")


@pytest.fixture
def stored(original):
    return StoredCheckpoint(original / "checkpoints" / "20")
