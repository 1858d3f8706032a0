import json
import os
import struct
import time
from unittest.mock import Mock, call

import pytest
import yaml
from spmdkit.launch.cli import main
from spmdkit.layouts.paths import flatten_mapping
from spmdkit.mesh.errors import UserError
from spmdkit.training.callbacks.callback import Run
from spmdkit.training.callbacks.trackers import MLflow, TensorBoard, WeightsAndBiases, _name
from support.runs import write_config
from support.training import play


@pytest.mark.parametrize(
    ("tracker", "library", "extra"),
    [(TensorBoard, "tensorboardX", "tensorboard"), (WeightsAndBiases, "wandb", "wandb"), (MLflow, "mlflow", "mlflow")],
)
def test_names_the_extra_of_a_missing_library(tracker, library, extra, monkeypatch):
    monkeypatch.setattr("spmdkit.training.callbacks.trackers.find_spec", lambda name: None)
    message = rf"{library} is not installed\. Install it with: pip install 'spmdkit\[{extra}\]'\."
    with pytest.raises(UserError, match=message):
        play(tracker())


def events(folder):
    """Those of all files: each record has a length, a checksum, its bytes, a checksum."""
    from tensorboardX.proto import event_pb2

    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            yield event_pb2.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def scalars(folder):
    """(metric, step) -> value."""
    return {(value.tag, event.step): value.simple_value for event in events(folder) for value in event.summary.value}


def test_tensorboard_contains_every_metric(tmp_path):
    play(TensorBoard(), losses=[0.125], every=3, steps=4, folder=tmp_path)
    losses = {("loss", step): float(step) for step in (1, 2, 3, 4)}
    assert scalars(tmp_path / "tensorboard") == {**losses, ("eval_loss", 3): 0.125}


@pytest.mark.parametrize(("start", "hidden_from"), [(0, []), (2, [3])])
def test_tensorboard_hides_steps_that_a_resumed_run_repeats(start, hidden_from, tmp_path):
    play(TensorBoard(), start=start, steps=4, folder=tmp_path)
    found = [event.step for event in events(tmp_path / "tensorboard") if event.HasField("session_log")]
    assert found == hidden_from


def test_other_processes_send_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "is_main", False)
    play(TensorBoard(), losses=[0.125], steps=2, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def records_of(data):
    """After 7 bytes, blocks of 32 KiB of parts: checksum, length, kind (1 whole, 2 first, 3 middle, 4 last), bytes."""
    from wandb.proto import wandb_internal_pb2

    found, parts, at = [], b"", 7
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return found


def records_in(folder):
    import wandb  # pyright: ignore[reportMissingImports]

    wandb.teardown()  # its service writes the rest of the file
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    return records_of(file.read_bytes())


def exit_codes(records):
    return [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"]


@pytest.mark.slow
@pytest.mark.libraries
@pytest.mark.filterwarnings("default")
def test_wandb_writes_metrics_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="no wandb: pip install 'spmdkit[wandb]'")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    play(WeightsAndBiases(project="mine"), losses=[0.125], every=3, steps=4, folder=tmp_path / "good")
    records = records_in(tmp_path / "good")
    written = [
        {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [each["_step"] for each in written] == [1, 2, 3, 4]
    assert [each["loss"] for each in written] == [1, 2, 3, 4]
    assert [each.get("eval_loss") for each in written] == [None, None, 0.125, None]
    assert [record.run.project for record in records if record.WhichOneof("record_type") == "run"][:1] == ["mine"]
    assert exit_codes(records) == [0]
    with pytest.raises(UserError, match="broken"):
        play(WeightsAndBiases(), Breaks(), steps=4, folder=tmp_path / "failed")
    assert exit_codes(records_in(tmp_path / "failed")) == [1]


class Breaks:
    def on_step_end(self, run, record):
        if record["step"] == 3:
            raise RuntimeError("broken")


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
def test_mlflow_contains_the_metrics_and_the_config(tmp_path):
    pytest.importorskip("mlflow")
    callback = {"name": "mlflow", "experiment": "mine"}
    train = {"steps": 4, "global_batch": 16}
    sample = {"length": 0, "prompt": "x" * 600}
    sections = {"eval": {"every": 2}, "callbacks": [callback], "sample": sample}
    config = write_config(tmp_path, train=train, run={"log_every": 1}, **sections)
    assert main(["train", str(config)]) == 0
    (folder,) = run_folders(tmp_path / "run" / "mlruns")
    milliseconds = (folder / "metrics" / "loss").read_text().split()[0]
    assert abs(float(milliseconds) / 1000 - time.time()) < 3600
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    names = {name for record in records for name in record} - {"step", "run"}
    assert {path.name for path in (folder / "metrics").iterdir()} == names
    for name in names:
        expected = [(record[name], record["step"]) for record in records if name in record]
        assert values_of(folder, name) == expected, name
    assert len(values_of(folder, "loss")) == 4
    params = {path.name: path.read_text() for path in (folder / "params").iterdir()}
    whole = flatten_mapping(yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()))
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
def test_mlflow_omits_non_finite_values_and_marks_failures(tmp_path):
    pytest.importorskip("mlflow")

    with pytest.raises(UserError, match="broken"):
        play(MLflow(), Breaks(), losses=[float("inf"), 0.5], every=1, steps=4, folder=tmp_path)
    (folder,) = run_folders(tmp_path / "mlruns")
    assert values_of(folder, "eval_loss") == [(0.5, 2), (0.5, 3)]
    assert status_of(folder) == 4


@pytest.mark.libraries
@pytest.mark.filterwarnings("default")
def test_resumed_run_is_another_one_of_the_experiment(monkeypatch, tmp_path):
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
def test_mlflow_sends_to_the_tracking_uri(monkeypatch, tmp_path):
    """A store elsewhere stands for a server."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    play(MLflow(tracking_uri=(tmp_path / "store").as_uri()), every=1, steps=1, folder=tmp_path / "run")
    assert len(run_folders(tmp_path / "store")) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("finished", "code", "status"), [(True, 0, "FINISHED"), (False, 1, "FAILED")])
def test_every_tracker_is_told_once_how_a_run_ends(finished, code, status):
    client = Mock()
    for tracker in (WeightsAndBiases(), MLflow(), TensorBoard()):
        tracker._client, tracker._run_id = client, "1"
        tracker.on_train_end(None) if finished else None
        tracker.close()
        tracker.close()
    assert client.mock_calls == [call.finish(exit_code=code), call.set_terminated("1", status), call.close()]


def test_mlflow_failure_does_not_stop_training(monkeypatch, tmp_path):
    """One warning, of the first call; after it there is none."""
    monkeypatch.setattr("spmdkit.training.callbacks.trackers.find_spec", lambda name: name)
    monkeypatch.setattr(MLflow, "_open", refuse)
    with pytest.warns(UserWarning, match="MLflow failed: OSError: no route to host. Training continues") as warned:
        play(MLflow(), every=1, steps=3, folder=tmp_path)
    assert sum("MLflow failed" in str(each.message) for each in warned) == 1


def refuse(self, run):
    raise OSError("no route to host")


def test_mlflow_replaces_invalid_characters_of_names():
    assert _name("data.layout.in(puts|x).*") == "data.layout.in_puts_x_._"
    assert _name("optimizer.groups.layers/0 a-b") == "optimizer.groups.layers/0 a-b"
