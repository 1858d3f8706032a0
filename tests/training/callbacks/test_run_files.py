"""Paths of callbacks never lead to the run's own files."""

import os

import pytest
from spmdkit.mesh.errors import UserError
from spmdkit.training.callbacks.callback_catalog import StopFile
from spmdkit.training.callbacks.recording import CSVLog, Profile
from spmdkit.training.callbacks.trackers import TensorBoard
from spmdkit.training.run_files import BESIDE, PIECES, check_output, own_file
from support.training import play

OWN = r"\.path=.* leads to .*, which the run keeps in run.dir"
BAD = {
    "the config": (StopFile(path="config.yaml"), OWN),
    "the log": (CSVLog(path="metrics.jsonl"), OWN),
    "the table of another callback": (StopFile(path="metrics.csv"), OWN),
    "below the checkpoints": (CSVLog(path="checkpoints/4/a.csv"), OWN),
    "the checkpoints": (TensorBoard(path="checkpoints"), OWN),
    "the owner": (CSVLog(path="owner.json"), OWN),
    "a claim on the directory": (CSVLog(path="owner.json.after-1"), OWN),
    "a trace in the config": (Profile(path="config.yaml"), OWN),
    "a detour": (CSVLog(path="a/../config.yaml"), OWN),
    "a link": (StopFile(path="link"), OWN),
    "the directory itself": (CSVLog(path=""), "is a directory, but a file is written there"),
    "a directory": (StopFile(path="a"), "is a directory, but a file is written there"),
    "below a file": (CSVLog(path="notes/a.csv"), "cannot be written: Not a directory"),
    "too long": (CSVLog(path="n" * 300), "cannot be written: File name too long"),
    "a file for a directory": (Profile(path="notes"), "is a file, but a directory is written there"),
    "a file system that takes no files": (CSVLog(path="/proc/1/a.csv"), "cannot be written"),
}


@pytest.mark.parametrize("name", BAD)
def test_rejects_invalid_path_before_training(name, tmp_path):
    callback, message = BAD[name]
    (tmp_path / "a").mkdir()
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "link").symlink_to("config.yaml")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=message):
        play(callback, folder=tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_names_the_kind_of_the_output_once(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(UserError) as caught:
        check_output(tmp_path, "a", "file", "callbacks.0.path", "metrics.csv", probe=True)
    assert str(caught.value) == (
        f"callbacks.0.path='a': {tmp_path / 'a'} is a directory, but a file is written there. Choose another path."
    )


@pytest.mark.parametrize("callback", [CSVLog(), CSVLog(path="a/b.csv"), StopFile(), StopFile(path="a/../stop")])
def test_accepts_other_paths(callback, tmp_path):
    play(callback, folder=tmp_path)


@pytest.mark.parametrize("name", [*PIECES, *BESIDE])
def test_recognizes_own_files(name, tmp_path):
    assert own_file(tmp_path, tmp_path / name) == name
    assert own_file(tmp_path, tmp_path / "a" / name) is None
    assert own_file(tmp_path, tmp_path.parent / name) is None
    assert own_file(tmp_path, os.path.relpath(tmp_path / name)) == name  # pyright: ignore[reportArgumentType]
