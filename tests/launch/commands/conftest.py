"""Lets the tests of this folder import `small_runs`, `ranks` and `runs`, and gives them a run that was not trained."""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS / "launch" / "finished"), str(TESTS / "multiprocess"), str(TESTS)]

from runs import write_config  # noqa: E402  (found there)
from small_runs import leave_run  # noqa: E402


@pytest.fixture(scope="session")
def untrained(tmp_path_factory) -> Path:
    """The config of a classifier on data 2 x fsdp 4; run/ beside it holds the steps 4 and 8."""
    path = write_config(tmp_path_factory.mktemp("commands"))
    leave_run(path)
    return path
