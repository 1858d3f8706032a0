import struct

import pytest
from play import play
from spmdkit.mesh.errors import UserError
from spmdkit.training.callbacks.trackers import tensorboard
from spmdkit.training.callbacks.trackers.tensorboard import TensorBoard


def scalars(folder):
    """(metric, step) -> value, of all files of events: each record has a length, a checksum, its bytes, a checksum."""
    from tensorboardX.proto import event_pb2

    found = {}
    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
            data = data[16 + length :]
    return found


def test_every_metric_of_every_record(tmp_path):
    play(TensorBoard(), losses=[0.125], every=3, steps=4, folder=tmp_path)
    losses = {("loss", step): float(step) for step in (1, 2, 3, 4)}
    assert scalars(tmp_path / "tensorboard") == {**losses, ("eval_loss", 3): 0.125}


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("spmdkit.training.callbacks.trackers.optional.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"tensorboardX is not installed.*pip install 'spmdkit\[tensorboard\]'"):
        play(tensorboard.TensorBoard())
