import pytest
from small_checkpoints import damage, host_state, write
from spmdkit.launch.inspection import progress
from spmdkit.launch.inspection.finding import find
from spmdkit.launch.inspection.stored import StoredCheckpoint
from spmdkit.launch.inspection.verify import summary, verify, verify_one
from spmdkit.training.checkpointing.errors import CheckpointError


def test_whole_checkpoints_are_whole(original, monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.0)
    verdicts = list(verify(find(str(original))))
    assert [each.folder.name for each in verdicts] == ["10", "20", "30"]
    assert all(each.is_whole and each.checksums for each in verdicts)
    assert "whole; 7 arrays, 3.1 KiB are bit for bit what was saved" in str(verdicts[0])
    assert summary(verdicts) == "3 checkpoints verified"
    assert "checkpoints/30: 3.1 KiB of 3.1 KiB" in capsys.readouterr().err


def test_all_that_is_damaged_is_named(run):
    damage(run / "checkpoints" / "20")
    (run / "checkpoints" / "30" / "state" / "_METADATA").unlink()
    verdicts = {each.folder.name: each for each in verify(find(str(run)))}
    assert [name for name, each in verdicts.items() if each.is_whole] == ["10"]
    assert set(verdicts["20"].problems) <= {*StoredCheckpoint(run / "checkpoints" / "10").names, ""}
    assert "/20: DAMAGED\n  " in str(verdicts["20"])
    assert "_METADATA" in str(verdicts["30"])
    said = summary(list(verdicts.values()))
    assert said.startswith("2 of 3 checkpoints damaged: 20, 30. ")


def test_every_file_that_is_missing_or_cut_is_found(run):
    """Of every file below the data, in turn: it is told, or nothing that is read is in it."""
    checkpoint = run / "checkpoints" / "20"
    found = 0
    for path in sorted(path for path in (checkpoint / "state").rglob("*") if path.is_file()):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        found += not verify_one(checkpoint).is_whole
        path.unlink()
        found += not verify_one(checkpoint).is_whole
        path.write_bytes(whole)
    assert found >= 4
    assert verify_one(checkpoint).is_whole


def test_a_changed_array_is_named(original, monkeypatch):
    """The files are what was written; an array had changed on its way to them."""
    stored = StoredCheckpoint(original / "checkpoints" / "20")
    wrong = {**stored.checksums, "params/norm": 1}
    monkeypatch.setattr(StoredCheckpoint, "checksums", wrong)
    verdict = verify_one(original / "checkpoints" / "20")
    assert verdict.problems == {"params/norm": "it reads as other bits than were saved"}
    assert "  params/norm: it reads as other bits than were saved" in str(verdict)
    assert verdict.to_json()["whole"] is False


def test_pieces_that_are_missing_do_not_read_as_zeros(original, monkeypatch):
    monkeypatch.setattr(StoredCheckpoint, "missing_chunks", lambda self, path: 2 * (path == "params/norm"))
    assert verify_one(original / "checkpoints" / "20").problems == {"params/norm": "2 pieces of it missing"}


def test_without_checksums_that_is_said(tmp_path, monkeypatch):
    from spmdkit.training.checkpointing import checkpoints

    monkeypatch.setattr(checkpoints, "CHECKSUMS", "key2")
    run = write(tmp_path / "run", host_state(5))
    verdict = verify_one(run / "checkpoints" / "5")
    assert verdict.is_whole
    assert not verdict.checksums
    assert "earlier version and has no checksums" in str(verdict)


def test_one_of_a_run_that_has_none(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        list(verify(find(str(tmp_path))))


def test_verifies_a_run_that_is_reached_through_its_parent(original, monkeypatch):
    """TensorStore rejects a path that contains `..`."""
    (original / "logs").mkdir(exist_ok=True)
    monkeypatch.chdir(original / "logs")
    for given in ("..", f"../../{original.name}", str(original / "logs" / ".." / "checkpoints" / "10")):
        assert all(each.is_whole for each in verify(find(given)))
    assert StoredCheckpoint(original / "logs" / ".." / "checkpoints" / "10").read("key").shape == (2,)
