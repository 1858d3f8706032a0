"""Several runs: names that tell them apart, and the keys of their configs that differ."""

from pathlib import Path

import pytest
from spmdkit.launch.reporting.compare import compared, config_differences, short_names
from spmdkit.launch.reporting.record import read_run
from spmdkit.training.report.comparison import MISSING


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["/r/a", "/r/b"], ["a", "b"]),
        (["/r/one/run", "/r/two/run"], ["one/run", "two/run"]),
        (["/r/a", "/r/a/b"], ["a", "a/b"]),
        (["/x/a", "/y/a"], ["/x/a", "/y/a"]),
        (["/a", "/b/c"], ["/a", "/b/c"]),
    ],
)
def test_names_tell_runs_apart(folders, names):
    assert short_names([Path(folder) for folder in folders]) == names


def test_only_keys_that_differ():
    one = {"run": {"dir": "a", "seed": 0}, "strategy": {"fsdp": {"size": 4}}, "callbacks": [], "sample": {}}
    two = {"run": {"dir": "b", "seed": 0}, "strategy": {"data": 2}, "callbacks": [{"name": "csv"}], "sample": {}}
    assert config_differences([one, two]) == {
        "strategy.fsdp.size": [4, MISSING],
        "strategy.data": [MISSING, 2],
        "callbacks": [[], [{"name": "csv"}]],
    }
    assert config_differences([one, one]) == {}


def test_runs_keep_what_is_theirs(leave):
    records = [read_run(leave("a")), read_run(leave("b", metrics=[{"step": 4, "loss": 1.0}]))]
    runs = compared(records)
    assert [run.name for run in runs] == ["a", "b"]
    assert [run.figures["loss"] for run in runs] == [2.0, 1.0]
    assert runs[1].metrics == [{"step": 4, "loss": 1.0}]
