"""A real run of MLflow in files: nothing leaves the machine. Its files are read as they are, not through MLflow."""

import json
import os
import time

import pytest
import yaml
from play import play
from runs import write_config
from spmdkit.launch.cli import main
from spmdkit.mesh.errors import UserError
from spmdkit.training.callbacks.run import Run
from spmdkit.training.callbacks.trackers.mlflow import MLflow, _name


def run_folders(store):
    return [path.parent for path in store.glob("*/*/meta.yaml") if (path.parent / "metrics").is_dir()]


def values_of(folder, name):
    """(value, step) of each line of a metric: "time value step"."""
    lines = (folder / "metrics" / name).read_text().splitlines()
    return [(float(value), int(step)) for _, value, step in map(str.split, lines)]


def leaves(tree, above=""):
    """Every key of a config with its value as text; an empty section is a value."""
    found = {}
    for name, value in tree.items():
        deeper = leaves(value, f"{above}{name}.") if isinstance(value, dict) and value else {f"{above}{name}": value}
        found |= deeper
    return found


def status_of(folder):
    """1 running, 3 finished, 4 failed."""
    return yaml.safe_load((folder / "meta.yaml").read_text())["status"]


@pytest.mark.libraries
@pytest.mark.filterwarnings("default")
def test_its_values_are_those_of_the_log(tmp_path):
    pytest.importorskip("mlflow")
    callback = {"name": "mlflow", "experiment": "mine"}
    train = {"steps": 4, "global_batch": 16}
    sample = {"length": 0, "prompt": "x" * 600}
    sections = {"eval": {"every": 2}, "callbacks": [callback], "sample": sample}
    config = write_config(tmp_path, train=train, run={"log_every": 1}, **sections)
    begin = int(1000 * time.time())
    assert main(["train", str(config)]) == 0
    end = int(1000 * time.time())
    (folder,) = run_folders(tmp_path / "run" / "mlruns")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    names = {name for record in records for name in record} - {"step"}
    assert {path.name for path in (folder / "metrics").iterdir()} == names
    for name in names:
        expected = [(record[name], record["step"]) for record in records if name in record]
        assert values_of(folder, name) == expected, name
    assert len(values_of(folder, "loss")) == 4
    times = [int(line.split()[0]) for line in (folder / "metrics" / "loss").read_text().splitlines()]
    assert sorted(times) == times
    assert begin <= times[0] <= times[-1] <= end
    params = {path.name: path.read_text() for path in (folder / "params").iterdir()}
    whole = leaves(yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()))
    assert len(whole) > 100  # as many as one call takes
    assert params.keys() == whole.keys()
    assert params["train.global_batch"] == "16"
    assert params["sample.prompt"] == "x" * 500
    assert {key for key in whole if key != "sample.prompt" and params[key] != str(whole[key])} == set()
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


@pytest.mark.libraries
@pytest.mark.filterwarnings("default")
def test_a_run_that_goes_on_is_another_one_of_the_same_experiment(monkeypatch, tmp_path):
    """Nothing is reported to MLflow's makers, unless the user says so."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "")
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY")
    play(MLflow(experiment="mine"), every=1, steps=2, folder=tmp_path)
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    play(MLflow(experiment="mine", run_name="named"), every=1, start=2, steps=4, folder=tmp_path)
    folders = {(folder / "tags" / "mlflow.runName").read_text(): folder for folder in run_folders(tmp_path / "mlruns")}
    assert folders.keys() == {tmp_path.name, "named"}
    assert len({folder.parent for folder in folders.values()}) == 1
    for name, start in ((tmp_path.name, "0"), ("named", "2")):
        assert (folders[name] / "tags" / "spmdkit.start_step").read_text() == start
        assert (folders[name] / "tags" / "spmdkit.run_dir").read_text() == str(tmp_path)
        assert status_of(folders[name]) == 3


@pytest.mark.libraries
@pytest.mark.filterwarnings("default")
def test_a_server_that_is_named_gets_it_and_one_process_gives_it(monkeypatch, tmp_path):
    """A store elsewhere stands for a server."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    play(MLflow(tracking_uri=(tmp_path / "store").as_uri()), every=1, steps=1, folder=tmp_path / "run")
    assert len(run_folders(tmp_path / "store")) == 1
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(Run, "is_main", False)
    play(MLflow(), every=1, steps=1, folder=tmp_path / "other")
    assert not (tmp_path / "other").exists()


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
