"""Every example of data trains: from its YAML file, as a user types it, a few steps."""

import pytest
from support.runs import EXAMPLES

FEW = ["train.steps=3", "train.global_batch=16", "eval.batches=2", "sample.length=0", "run.log_every=1"]


SLOW = ("data_mixture",)
"""Language models: they compile for some seconds."""
STARTS = [
    *((path, ()) for path in sorted(EXAMPLES.glob("data_*.yaml"))),
    (EXAMPLES / "data_loaders.yaml", ("data.source=data_loaders:loader",)),
]


@pytest.mark.slow_cases("data_loaders", "data_loaders-data.source=data_loaders:loader", "data_several_outputs")
@pytest.mark.parametrize(
    ("example", "overrides"),
    [
        pytest.param(
            path, overrides, id="-".join((path.stem, *overrides)), marks=[pytest.mark.slow] * (path.stem in SLOW)
        )
        for path, overrides in STARTS
    ],
)
def test_it_trains(example, overrides, tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    assert "Evaluation loss" in cli(0, "train", example, f"run.dir={tmp_path}/run", *overrides, *FEW).out
    assert (tmp_path / "run" / "report.html").is_file()
