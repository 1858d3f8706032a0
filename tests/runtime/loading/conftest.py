"""Gives them a run."""

from pathlib import Path

import pytest
from support.runs import leave_run, write_config, write_language_config


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
