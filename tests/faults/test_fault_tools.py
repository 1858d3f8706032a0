"""The tools of this directory: damaged checkpoints, and the comparison of two runs."""

import json
import shutil

import pytest
from spmdkit.launch.cli import main
from support.faults import damage, latest_checkpoint
from support.runs import same_run, write_config


@pytest.mark.parametrize(
    ("how", "left", "data"),
    [
        ("flip", 4, b"01234\x316789"),
        ("truncate", 4, b"01234"),
        ("remove", 2, None),
        ("metadata", 2, b"0123456789"),
        ("empty", 0, None),
    ],
)
def test_damages_the_latest_checkpoint(how, left, data, tmp_path):
    directory = tmp_path / "checkpoints" / "12"
    for name in ("state/d/one", "state/ocdbt.process_0/d/two", "_CHECKPOINT_METADATA", "state/_METADATA"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(b"0123456789")
    (tmp_path / "checkpoints" / "8").mkdir()
    (tmp_path / "checkpoints" / "removed-16").mkdir()
    assert latest_checkpoint(directory.parent) == directory
    damage(directory, how)
    files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    assert len(files) == left
    assert (files["state/d/one"].read_bytes() if "state/d/one" in files else None) == data


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
