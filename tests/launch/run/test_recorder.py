"""What is recorded of a step: the learning rate that it has used."""

import pytest
from runs import metrics, write_config
from spmdkit.launch.cli import main

PLATEAU = {"name": "plateau", "patience": 1, "window_steps": 1, "tolerance": 0.9, "factor": 0.5}
"""A loss that does not fall to a tenth of the lowest within a step halves the rate: from the second step on, always."""


@pytest.mark.slow
def test_the_rate_of_a_plateau_is_the_one_that_was_used(tmp_path):
    """Also of steps that are read late, of those after a resume, and where a group has a schedule of its own."""
    groups = {"layers/.*/bias": {"schedule": {"name": "constant"}, "learning_rate": 0.5}}
    optimizer = {"name": "sgd", "learning_rate": 0.01, "schedule": PLATEAU, "groups": groups}
    train = {"steps": 5, "global_batch": 16}
    config = write_config(tmp_path, optimizer=optimizer, train=train, checkpoint={"every": 5}, eval={"every": 3})
    assert main(["train", str(config)]) == 0
    assert main(["train", str(config), "train.steps=9", "run.log_every=2"]) == 0
    logged = {record["step"]: record["learning_rate"] for record in metrics(tmp_path / "run")}
    assert set(logged) >= {1, 2, 3, 4, 5, 6, 8, 9}
    assert logged == pytest.approx({step: 0.01 * 0.5 ** (step - 1) for step in logged}, rel=1e-6)
