"""A run that diverges stops with exit code 3, and what it leaves on disk is sound."""

import numpy as np
import pytest
from spmdkit.launch.cli import main
from spmdkit.mesh.exit_codes import DIVERGED
from support.runs import losses, state_arrays, write_config

pytestmark = pytest.mark.slow


@pytest.fixture
def config(tmp_path):
    return write_config(
        tmp_path, checkpoint={"every": 1}, optimizer={"learning_rate": 0.01}, train={"steps": 6, "global_batch": 16}
    )


SPOILING = ["optimizer.learning_rate=3e38", "optimizer.weight_decay=100"]  # beyond float32 in one update


def newest(config) -> int:
    return max(int(path.name) for path in (config.parent / "run" / "checkpoints").glob("[0-9]*"))


def test_stops_at_nonfinite_loss(config, cli):
    error = cli(DIVERGED, "train", config, "optimizer.learning_rate=1e30").err
    assert error.startswith("error: Step 2: the loss is ")
    assert "Lower optimizer.learning_rate" in error
    assert "Traceback" not in error
    assert list(losses(config.parent / "run")) == [1]
    step = newest(config)
    assert step == 1
    assert all(np.isfinite(leaf).all() for leaf in state_arrays(config, step).values() if leaf.dtype.kind == "f")


def test_never_saves_nonfinite_parameters_and_resumes_from_last_good_step(config, cli):
    assert main(["train", str(config), "train.steps=2"]) == 0
    error = cli(DIVERGED, "train", config, *SPOILING).err
    assert "error: Step 3: the parameters are not finite after its update." in error
    assert newest(config) == 2
    assert "at step 2 of 6" in cli(0, "train", config).out
    assert list(losses(config.parent / "run")) == [1, 2, 3, 4, 5, 6]
