"""A run with checkpoints that was not trained."""

from pathlib import Path

import pytest
from support.runs import leave_run, write_config


@pytest.fixture(scope="session")
def untrained(tmp_path_factory) -> Path:
    """The config of a classifier on data 2 x fsdp 4; run/ beside it holds the steps 4 and 8."""
    path = write_config(tmp_path_factory.mktemp("commands"))
    leave_run(path)
    return path
