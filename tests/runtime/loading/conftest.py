"""Gives them a run."""

from pathlib import Path

import pytest
from support.runs import leave_run, write_staged_config


@pytest.fixture(scope="session")
def folder(untrained) -> Path:
    """The folder of that run."""
    return untrained.parent / "run"


@pytest.fixture(scope="session")
def staged(tmp_path_factory) -> Path:
    """The config of a language model on stages, which store its blocks in another order; run/ holds step 4."""
    path = write_staged_config(tmp_path_factory.mktemp("staged"))
    leave_run(path, steps=(4,))
    return path
