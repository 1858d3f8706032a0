"""A real run of Weights & Biases, offline: nothing leaves the machine."""

import json
import struct

import pytest
from play import play
from spmdkit.mesh.errors import UserError
from spmdkit.training.callbacks.trackers.weights_and_biases import WeightsAndBiases


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


@pytest.mark.slow
@pytest.mark.libraries
@pytest.mark.filterwarnings("default")
def test_metrics_are_written_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="no wandb: pip install 'spmdkit[wandb]'")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    play(WeightsAndBiases(project="mine"), losses=[0.125], every=3, steps=4, folder=tmp_path)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = records_of(file.read_bytes())
    written = [
        {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [each["_step"] for each in written] == [1, 2, 3, 4]
    assert [each["loss"] for each in written] == [1, 2, 3, 4]
    assert [each.get("eval_loss") for each in written] == [None, None, 0.125, None]
    assert [record.run.project for record in records if record.WhichOneof("record_type") == "run"][:1] == ["mine"]
    assert [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"] == [0]


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("spmdkit.training.callbacks.trackers.optional.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"wandb is not installed.*pip install 'spmdkit\[wandb\]'"):
        play(WeightsAndBiases())
