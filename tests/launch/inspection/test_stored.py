"""A checkpoint read without devices is what was saved, and what is damaged is told."""

import subprocess
import sys

import numpy as np
import pytest
from small_checkpoints import ABOUT, damage, host_state, write
from spmdkit.launch.inspection import stored as stored_file
from spmdkit.launch.inspection.stored import StoredCheckpoint
from spmdkit.layouts.paths import leaves_with_paths
from spmdkit.training.checkpointing.errors import CheckpointUnavailable, DamagedCheckpoint


@pytest.fixture
def stored(original):
    return StoredCheckpoint(original / "checkpoints" / "20")


def test_every_array_reads_as_it_was_saved(stored):
    expected = dict(leaves_with_paths(host_state(20)))
    assert set(stored.names) == set(stored.arrays) == set(expected)
    for path, leaf in expected.items():
        array, leaf = stored.arrays[path], np.asarray(leaf)
        assert (array.shape, array.dtype, array.nbytes) == (leaf.shape, leaf.dtype, leaf.nbytes)
        np.testing.assert_array_equal(stored.read(path), leaf)
        assert stored.missing_chunks(path) == 0
    assert stored.step == 20
    assert stored.about == ABOUT
    assert stored.mesh == {"fsdp": 8}
    assert sum(array.size for array in stored.parameters) == 3 * 16 * 8 + 16


@pytest.mark.parametrize("most", [1, 100, 1 << 20])
def test_parts_of_any_size_make_up_the_array(stored, most, monkeypatch):
    monkeypatch.setattr(stored_file, "PART_BYTES", most)
    path = "params/blocks/kernel"
    whole, count = np.zeros((3, 16, 8), np.float32), 0
    for region, part in stored.parts(path):
        assert not whole[region].any()
        whole[region], count = part, count + 1
        np.testing.assert_array_equal(stored.part(path, region), part)
    np.testing.assert_array_equal(whole, host_state(20).params["blocks"]["kernel"])
    assert count == {1: 8, 100: 8, 1 << 20: 1}[most], "the chunks are the 8 shards"


def test_a_flipped_bit_is_told(run):
    damage(run / "checkpoints" / "20")
    broken = StoredCheckpoint(run / "checkpoints" / "20")
    with pytest.raises(DamagedCheckpoint, match="/20 is damaged: "):
        [broken.read(path) for path in broken.names]


def test_other_bits_than_the_checksum_says_are_told(stored):
    """As where an array has changed before it came to the disk."""
    stored.checksums["params/norm"] ^= 1
    stored.read("key")
    with pytest.raises(DamagedCheckpoint, match="params/norm of 7 arrays read as other bits than were saved"):
        stored.read("params/norm")


def test_without_checksums_it_reads_too(tmp_path, monkeypatch):
    from spmdkit.training.checkpointing import checkpoints

    monkeypatch.setattr(checkpoints, "CHECKSUMS", "key2")  # under another name nobody looks for them
    run = write(tmp_path / "run", host_state(5), about=None)
    old = StoredCheckpoint(run / "checkpoints" / "5")
    assert old.checksums is None
    assert old.about == {}
    np.testing.assert_array_equal(old.read("key"), host_state(5).key)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"tree_metadata": 3}', b"\xff\x00"])
def test_a_damaged_description_is_told(run, text):
    (run / "checkpoints" / "20" / "state" / "_METADATA").write_bytes(text)
    with pytest.raises(DamagedCheckpoint, match="/20 is damaged: "):
        StoredCheckpoint(run / "checkpoints" / "20")


def test_what_may_not_be_read_is_not_called_damaged(run, monkeypatch):
    def refuse(*ignored):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    with pytest.raises(CheckpointUnavailable, match="leave it there"):
        StoredCheckpoint(run / "checkpoints" / "20")


def test_no_device_is_opened(original):
    """Neither for reading nor for describing; JAX is told of a platform that does not exist."""
    code = f"""if True:
        from pathlib import Path
        from spmdkit.launch.inspection.finding import find
        from spmdkit.launch.inspection.inspect import inspect, text
        from spmdkit.launch.inspection.verify import verify
        from spmdkit.mesh.compat import backend_started
        text(inspect(find({str(original)!r})))
        assert all(each.is_whole for each in verify(find({str(original)!r})))
        assert not backend_started()
    """
    environment = {"JAX_PLATFORMS": "nowhere", "PATH": ""}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)
