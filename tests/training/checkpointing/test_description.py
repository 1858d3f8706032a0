"""Checksums cover the description of a checkpoint: every byte that a resume reads, notes of callbacks included."""

import json

import pytest
from checkpoint_states import abstract, assert_equal, host_state, placed
from spmdkit.launch.inspection.stored import StoredCheckpoint
from spmdkit.launch.inspection.verify import verify_one
from spmdkit.training.checkpointing.checkpoints import Checkpoints
from spmdkit.training.checkpointing.description import check_description
from spmdkit.training.checkpointing.errors import DamagedCheckpoint

NOTES = {"callbacks": [["early_stopping", {"best": 2, "waited": 1}]], "data": {"batch": 10}}


@pytest.fixture
def noted(tmp_path):
    """A directory with checkpoints of steps 10 and 20 that contain notes."""
    state = placed(host_state(0), 2, "data", split=False)
    with Checkpoints(tmp_path / "checkpoints", keep=3, abstract_state=abstract(state), about={"a": 1}) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, placed(host_state(step), 2, "data", split=False), notes=NOTES)
    return tmp_path / "checkpoints"


def test_passes_over_a_checkpoint_with_a_changed_note(noted):
    path = noted / "20" / "_CHECKPOINT_METADATA"
    path.write_text(path.read_text().replace('"best": 2', '"best": 3'))
    verdict = verify_one(noted / "20")
    assert not verdict.is_whole
    assert "_CHECKPOINT_METADATA contains other bytes than were saved" in str(verdict)
    assert verify_one(noted / "10").is_whole
    state, said = placed(host_state(0), 2, "data", split=False), []
    with Checkpoints(noted, keep=3, abstract_state=abstract(state)) as checkpoints:
        with pytest.raises(DamagedCheckpoint, match="_CHECKPOINT_METADATA"):
            checkpoints.notes(20)
        restored = checkpoints.restore_newest(5, said.append)
        assert (restored.step, checkpoints.notes(10)) == (10, NOTES)
    assert_equal(restored.state, host_state(10))
    assert "Going back to the checkpoint before it." in said[0]


def test_detects_every_flipped_byte_of_the_description(noted):
    checkpoint = noted / "20"
    assert check_description(checkpoint)
    files = [path for path in checkpoint.rglob("*") if path.is_file() and "commit_success" not in path.name]
    described = [path for path in files if path.parent.name != "d" and "ocdbt.process_0" not in str(path)]
    assert {"_METADATA", "_sharding", "process_0", "checksums.json"} <= {path.name for path in described}
    for path in described:
        whole = path.read_bytes()
        time = str(json.loads(whole).get("commit_timestamp_nsecs", "")) if path.parent == checkpoint else ""
        harmless = range(whole.find(time.encode()), whole.find(time.encode()) + len(time))
        for position in {*range(0, len(whole), 7), len(whole) - 1} - {*harmless}:
            if not whole[position : position + 1].strip():
                continue  # another space between two entries is the same description
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
            with pytest.raises(DamagedCheckpoint):
                StoredCheckpoint(checkpoint)
        path.write_bytes(whole)
    assert check_description(checkpoint)


def test_detects_a_missing_file_of_the_description(noted):
    (noted / "20" / "state" / "_sharding").unlink()
    verdict = verify_one(noted / "20")
    assert not verdict.is_whole
    assert "_sharding" in str(verdict)


def test_reads_a_checkpoint_without_checksums_of_its_description(noted):
    (noted / "20" / "state" / "checksums.json").unlink()
    verdict = verify_one(noted / "20")
    assert verdict.is_whole
    assert not verdict.checksums
    assert "earlier version" in str(verdict)
