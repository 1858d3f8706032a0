"""Every example of data trains: from its YAML file, as a user types it, a few steps."""

from pathlib import Path

import pytest
from spmdkit.launch.cli import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("data_*.yaml"))
FEW = ["train.steps=3", "train.global_batch=16", "eval.batches=2", "sample.length=0", "run.log_every=1"]


def test_there_are_examples():
    assert len(EXAMPLES) >= 2


SLOW = ("data_mixture",)
"""Language models: they compile for some seconds."""


@pytest.mark.parametrize(
    "example",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in SLOW)) for path in EXAMPLES],
)
def test_it_trains(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(example), f"run.dir={tmp_path}/run", *FEW]) == 0
    printed = capsys.readouterr().out
    assert "Evaluation loss" in printed
    assert (tmp_path / "run" / "report.html").is_file()
