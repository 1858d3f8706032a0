"""Lets the tests of this folder import `small_checkpoints` and `runs`, and gives them a run to look at."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from small_checkpoints import host_state, write  # noqa: E402  (found there)


@pytest.fixture(scope="session")
def original(tmp_path_factory) -> Path:
    """The folder of a run with checkpoints of steps 10, 20 and 30; not to be changed."""
    return write(tmp_path_factory.mktemp("original") / "run", *map(host_state, (10, 20, 30)))


@pytest.fixture
def run(original, tmp_path) -> Path:
    """A copy of it."""
    return shutil.copytree(original, tmp_path / "run")
