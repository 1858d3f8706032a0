"""Checkpoints on disk."""

import shutil
from pathlib import Path

import pytest
from spmdkit.checkpoints.manager import Checkpoints
from support.checkpoint_states import abstract, host_state, placed, run_state, write


@pytest.fixture
def written(tmp_path):
    """A folder with checkpoints of steps 10 and 20, written on fsdp=8."""
    state = placed(host_state(0), 8, "fsdp", split=True)
    with Checkpoints(tmp_path / "checkpoints", keep=3, abstract_state=abstract(state)) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, placed(host_state(step), 8, "fsdp", split=True))
    return tmp_path / "checkpoints"


@pytest.fixture(scope="session")
def original(tmp_path_factory) -> Path:
    """The folder of a run with checkpoints of steps 10, 20 and 30; not to be changed."""
    states = map(run_state, (10, 20, 30))
    return write(tmp_path_factory.mktemp("original") / "run", *states)


@pytest.fixture
def run(original, tmp_path) -> Path:
    """A copy of it."""
    return shutil.copytree(original, tmp_path / "run")
