"""A real run of MLflow in files: nothing leaves the machine. Its files are read as they are, not through MLflow."""

import json

import pytest
import yaml
from play import play
from runs import write_config
from spmdkit.launch.cli import main
from spmdkit.mesh.errors import UserError
from spmdkit.training.callbacks.trackers.mlflow import MLflow, _name


def run_folders(store):
    return [path.parent for path in store.glob("*/*/meta.yaml") if (path.parent / "metrics").is_dir()]


def values_of(folder, name):
    """(value, step) of each line of a metric: "time value step"."""
    lines = (folder / "metrics" / name).read_text().splitlines()
    return [(float(value), int(step)) for _, value, step in map(str.split, lines)]


def status_of(folder):
    """1 running, 3 finished, 4 failed."""
    return yaml.safe_load((folder / "meta.yaml").read_text())["status"]


@pytest.mark.libraries
@pytest.mark.filterwarnings("default")
def test_its_values_are_those_of_the_log(tmp_path):
    pytest.importorskip("mlflow")
    callback = {"name": "mlflow", "experiment": "mine"}
    train = {"steps": 4, "global_batch": 16}
    config = write_config(tmp_path, train=train, run={"log_every": 1}, eval={"every": 2}, callbacks=[callback])
    assert main(["train", str(config)]) == 0
    (folder,) = run_folders(tmp_path / "run" / "mlruns")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    names = {name for record in records for name in record} - {"step"}
    assert {path.name for path in (folder / "metrics").iterdir()} == names
    for name in names:
        expected = [(record[name], record["step"]) for record in records if name in record]
        assert values_of(folder, name) == expected, name
    assert len(values_of(folder, "loss")) == 4
    assert (folder / "params" / "train.global_batch").read_text() == "16"
    assert (folder / "tags" / "mlflow.runName").read_text() == "run"
    assert yaml.safe_load((folder.parent / "meta.yaml").read_text())["name"] == "mine"
    assert status_of(folder) == 3


@pytest.mark.libraries
@pytest.mark.filterwarnings("default")
def test_what_is_not_finite_is_left_out_and_a_failure_is_told(tmp_path):
    pytest.importorskip("mlflow")

    class Breaks:
        def on_step_end(self, run, record):
            if record["step"] == 3:
                raise RuntimeError("broken")

    with pytest.raises(UserError, match="broken"):
        play(MLflow(), Breaks(), losses=[float("inf"), 0.5], every=1, steps=4, folder=tmp_path)
    (folder,) = run_folders(tmp_path / "mlruns")
    assert values_of(folder, "eval_loss") == [(0.5, 2), (0.5, 3)]
    assert status_of(folder) == 4


def test_a_server_that_is_gone_ends_nothing(monkeypatch, tmp_path):
    """One warning, of the first call; after it there is none."""
    monkeypatch.setattr("spmdkit.training.callbacks.trackers.mlflow.needs", lambda module, extra: None)
    monkeypatch.setattr(MLflow, "_begin", lambda self, run: setattr(self, "_client", object()))
    monkeypatch.setattr(MLflow, "_log", refuse)
    with pytest.warns(UserWarning, match="MLflow fails: OSError: no route to host. Training goes on") as told:
        play(MLflow(), every=1, steps=3, folder=tmp_path)
    assert sum("MLflow fails" in str(each.message) for each in told) == 1


def refuse(self, record):
    raise OSError("no route to host")


def test_names_are_those_that_it_takes():
    assert _name("data.layout.in(puts|x).*") == "data.layout.in_puts_x_._"
    assert _name("optimizer.groups.layers/0 a-b") == "optimizer.groups.layers/0 a-b"


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("spmdkit.training.callbacks.trackers.optional.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"mlflow is not installed.*pip install 'spmdkit\[mlflow\]'"):
        play(MLflow())
