"""Two runs of one config are the same; one bit, or one loss, and they are not."""

import json
import shutil

import numpy as np
import pytest
from runs import state_arrays, write_config
from spmdkit.launch.cli import main

from spmdkit.testing import arrays_of, losses_of, same_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = write_config(tmp_path_factory.mktemp("one"), train={"steps": 3, "global_batch": 16})
    assert main(["train", str(path)]) == 0
    return path


def test_arrays_are_read_onto_no_device(config):
    found = arrays_of(config.parent / "run")
    expected = state_arrays(config, 3)
    assert found.keys() == {path for path, array in expected.items() if array.size}
    assert all(np.array_equal(found[path], expected[path]) for path in found)


def test_the_same_and_not_the_same(config, tmp_path):
    run, other = config.parent / "run", tmp_path / "other"
    assert main(["train", str(config), f"run.dir={other}"]) == 0
    assert same_run(other, run) == []
    assert list(losses_of(run)) == [1, 2, 3]
    again = tmp_path / "again"
    assert main(["train", str(config), f"run.dir={again}", "run.seed=1"]) == 0
    problems = same_run(again, run)
    assert problems[0].startswith("metrics of 3 steps, first 1: ")
    assert any("other bits" in problem for problem in problems)


def test_a_step_that_is_missing(config, tmp_path):
    shutil.copytree(config.parent / "run", tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    kept = [line for line in path.read_text().splitlines() if json.loads(line)["step"] != 2]
    path.write_text("\n".join(kept) + "\n")
    assert same_run(tmp_path / "run", config.parent / "run") == ["steps logged: 2 from 1 to 3 and 3 from 1 to 3"]
