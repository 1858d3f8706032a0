"""Lets the tests of this folder import `checkpoint_states`."""

import sys
from pathlib import Path

import pytest
from spmdkit.training.checkpointing.checkpoints import Checkpoints

sys.path[:0] = [str(Path(__file__).parent)]

from checkpoint_states import abstract, host_state, placed  # noqa: E402  (after the path)


@pytest.fixture
def written(tmp_path):
    """A folder with checkpoints of steps 10 and 20, written on fsdp=8."""
    state = placed(host_state(0), 8, "fsdp", split=True)
    with Checkpoints(tmp_path / "checkpoints", keep=3, abstract_state=abstract(state)) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, placed(host_state(step), 8, "fsdp", split=True))
    return tmp_path / "checkpoints"
