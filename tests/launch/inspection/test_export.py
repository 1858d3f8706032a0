import os
import subprocess
import sys

import numpy as np
import pytest
from small_checkpoints import damage, host_state
from spmdkit.launch.inspection.export import export
from spmdkit.launch.inspection.stored import StoredCheckpoint
from spmdkit.layouts.paths import leaves_with_paths
from spmdkit.mesh.errors import UserError
from spmdkit.training.checkpointing.errors import DamagedCheckpoint

KINDS = ["out.safetensors", "out"]


@pytest.fixture
def stored(original):
    return StoredCheckpoint(original / "checkpoints" / "20")


def read(path):
    """The arrays of what was exported, by name."""
    if path.suffix == ".safetensors":
        from safetensors.numpy import load_file

        return load_file(path)
    return {str(file.relative_to(path).with_suffix("")): np.load(file, mmap_mode="r") for file in path.rglob("*.npy")}


def assert_equal(found, expected, kind):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        array = np.asarray(array)
        if array.dtype.kind == "V" and kind != "out.safetensors":
            array = array.astype(np.float32)
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_read_back_equal(stored, tmp_path, kind):
    exported = export(stored, tmp_path / kind)
    expected = dict(leaves_with_paths(host_state(20).params))
    assert_equal(read(tmp_path / kind), expected, kind)
    assert os.listdir(tmp_path) == [kind]
    wide = "; 1 of them, which NumPy has no dtype for, as float32" if kind != "out.safetensors" else ""
    assert str(exported) == f"Wrote {tmp_path / kind}: 2 arrays, 1.5 KiB{wide}."


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_state_reads_back_equal(stored, tmp_path, kind):
    export(stored, tmp_path / kind, whole_state=True)
    assert_equal(read(tmp_path / kind), dict(leaves_with_paths(host_state(20))), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whole_state", [False, True])
def test_blocks_by_themselves(stored, tmp_path, kind, whole_state, monkeypatch):
    from spmdkit.launch.inspection import stored as stored_file

    monkeypatch.setattr(stored_file, "PART_BYTES", 1)  # as many parts as there are chunks
    export(stored, tmp_path / kind, unstack=True, whole_state=whole_state)
    state = host_state(20)
    expected = dict(leaves_with_paths(state if whole_state else state.params))
    front = "params/" if whole_state else ""
    kernel = expected.pop(f"{front}blocks/kernel")
    expected |= {f"{front}blocks/{number}/kernel": kernel[number] for number in range(3)}
    assert_equal(read(tmp_path / kind), expected, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_replaced_unless_told(stored, original, tmp_path, kind):
    export(stored, tmp_path / kind)
    with pytest.raises(UserError, match=r"out\S* is there already\. Choose another name, or give --force"):
        export(stored, tmp_path / kind)
    export(StoredCheckpoint(original / "checkpoints" / "30"), tmp_path / kind, force=True)
    assert_equal(read(tmp_path / kind), dict(leaves_with_paths(host_state(30).params)), kind)
    assert os.listdir(tmp_path) == [kind]


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_damaged_checkpoint_nothing_is_left(run, tmp_path, kind):
    damage(run / "checkpoints" / "20")
    with pytest.raises(DamagedCheckpoint):
        export(StoredCheckpoint(run / "checkpoints" / "20"), tmp_path / kind, whole_state=True)
    assert [name for name in os.listdir(tmp_path) if name != "run"] == []


FULL = """
import resource, sys
from pathlib import Path
from spmdkit.launch.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
sys.exit(main(["checkpoint", "export", sys.argv[1], sys.argv[2]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_without_room_it_ends_with_a_message_and_leaves_nothing(original, tmp_path, kind):
    command = [sys.executable, "-c", FULL, str(original), str(tmp_path / kind)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith(f"error: {tmp_path / kind}")
    assert "larger than allowed (ulimit -f)" in ended.stderr
    assert os.listdir(tmp_path) == []


def test_a_target_that_cannot_be_is_told(stored, tmp_path):
    with pytest.raises(UserError, match=r"ends in '\.pt': export writes \.safetensors, or a folder"):
        export(stored, tmp_path / "model.pt")
    with pytest.raises(UserError, match=r"There is no folder .*/no to write model into"):
        export(stored, tmp_path / "no" / "model")
    stored.arrays = {"step": stored.arrays["step"]}
    with pytest.raises(UserError, match=r"holds no parameters\. Give --whole-state"):
        export(stored, tmp_path / "out")


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["", "checkpoints", "checkpoints/20", "checkpoints/20/out", "checkpoints/out"])
def test_force_never_replaces_a_run_or_its_checkpoints(name, stored, run):
    (run / "config.yaml").write_text("")
    (run / "metrics.jsonl").write_text("")
    before = files(run)
    with pytest.raises(UserError, match=r"is not an exported folder|is among the checkpoints of the run"):
        export(stored, run / name, force=True)
    assert files(run) == before


def test_force_never_replaces_files_that_no_export_wrote(stored, tmp_path):
    folder, file, link = tmp_path / "folder", tmp_path / "weights.safetensors", tmp_path / "link.safetensors"
    folder.mkdir()
    for target in (folder, file, link):
        if target is not folder:
            target.write_text("mine") if target is file else target.symlink_to(file)
        with pytest.raises(UserError, match=r"is not an exported|is a symbolic link"):
            export(stored, target, force=True)
    assert file.read_text() == "mine"
    folder.rmdir()
    export(stored, folder)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="contains other files as well: --force replaces only what an earlier export"):
        export(stored, folder, force=True)
    assert (folder / "notes.txt").read_text() == "mine"
