"""The comparison of two runs, which the tests of this directory use."""

import json
import shutil

import pytest
from spmdkit.launch.cli import main
from support.runs import same_run, write_config


@pytest.mark.slow
def test_same_run_finds_differences(tmp_path):
    config = write_config(tmp_path, train={"steps": 3, "global_batch": 16})
    run, other = tmp_path / "run", tmp_path / "other"
    assert main(["train", str(config)]) == 0
    assert main(["train", str(config), f"run.dir={other}", "run.seed=1"]) == 0
    problems = same_run(other, run)
    assert problems[0].startswith("step 1: ")
    assert any("other bits" in problem for problem in problems)
    shutil.copytree(run, tmp_path / "copy")
    assert same_run(tmp_path / "copy", run) == []
    path = tmp_path / "copy" / "metrics.jsonl"
    kept = [line for line in path.read_text().splitlines() if json.loads(line)["step"] != 2]
    path.write_text("\n".join(kept) + "\n")
    (problem,) = same_run(tmp_path / "copy", run)
    assert problem.startswith("step 2: None and ")
