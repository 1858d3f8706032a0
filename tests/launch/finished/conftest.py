"""Lets the tests of this folder import `small_runs`, `small_checkpoints` and `runs`, and gives them a run."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "inspection"), str(HERE.parents[1] / "multiprocess"), str(HERE.parents[1])]

from runs import write_config, write_language_config  # noqa: E402  (found there)
from small_runs import leave_run  # noqa: E402


@pytest.fixture(scope="session")
def config(tmp_path_factory) -> Path:
    """The config of a classifier on data 2 x fsdp 4, with a run in run/ that holds the steps 4 and 8."""
    path = write_config(tmp_path_factory.mktemp("finished"))
    leave_run(path)
    return path


@pytest.fixture(scope="session")
def folder(config) -> Path:
    """The folder of that run; not to be changed."""
    return config.parent / "run"


STAGES = {"pipe": {"size": 2, "schedule": "interleaved_1f1b", "virtual": 2, "microbatches": 4}, "data": 4}


@pytest.fixture(scope="session")
def staged(tmp_path_factory) -> Path:
    """The config of a language model on stages, which store its blocks in another order; run/ holds step 4."""
    model = {"name": "transformer", "layers": 4, "width": 16, "heads": 2, "mlp_width": 32}
    path = write_language_config(tmp_path_factory.mktemp("staged"), strategy=STAGES, model=model)
    leave_run(path, steps=(4,))
    return path
