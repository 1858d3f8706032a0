"""What is written reads back, by a reader that knows the specification alone."""

import errno
import json
import mmap

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors_reader import read
from spmdkit.mesh.errors import UserError
from spmdkit.models.hugging_face import safetensors
from spmdkit.models.hugging_face.safetensors import NAMES, Entry, allocate, header, mapped, open_arrays


def test_every_dtype_reads_back(tmp_path):
    arrays = {f"a/{name}": np.arange(6).reshape(2, 3).astype(dtype) for dtype, name in NAMES.items()}
    arrays["scalar"] = np.float32(2.5)
    entries = [Entry(name, np.shape(array), np.asarray(array).dtype) for name, array in arrays.items()]
    with mapped(tmp_path / "x", entries, {"step": "3"}) as targets:
        for name, array in arrays.items():
            targets[name][...] = array
    found, metadata = read(tmp_path / "x")
    assert metadata == {"step": "3"}
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == np.asarray(array).dtype
        np.testing.assert_array_equal(found[name], array)


def test_every_array_is_aligned():
    entries = [Entry("x", (3,), np.dtype(np.uint8)), Entry("y", (5,), np.dtype(np.float64))]
    begin, offsets = header([*entries, Entry("z", (1,), np.dtype(jnp.bfloat16))], {})
    assert len(begin) % 8 == 0
    assert all(offsets[entry.name] % entry.dtype.itemsize == 0 for entry in entries)


def test_a_dtype_that_the_format_lacks_is_told():
    with pytest.raises(UserError, match=r"safetensors has no dtype complex64, which c has\. Export to a folder"):
        header([Entry("c", (1,), np.dtype(np.complex64))], {})


def test_a_disk_without_room_is_told_before_anything_is_mapped(tmp_path):
    """By the real limit of a process; a mapping beyond it would kill."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (mmap.PAGESIZE, before[1]))
    try:
        with pytest.raises(OSError, match="big") as raised:
            allocate(tmp_path / "big", b"begin", 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG
    with pytest.raises(FileExistsError):
        allocate(tmp_path / "big", b"", 1)


@pytest.mark.parametrize("free", [10, 1 << 30])
def test_where_files_cannot_be_allocated_the_room_is_looked_at(tmp_path, monkeypatch, free):
    monkeypatch.delattr(safetensors.os, "posix_fallocate")
    monkeypatch.setattr(safetensors.shutil, "disk_usage", lambda path: type("usage", (), {"free": free}))
    if free < 100:
        with pytest.raises(OSError, match="No space left"):
            allocate(tmp_path / "x", b"begin", 100)
    else:
        allocate(tmp_path / "x", b"begin", 100)
        assert (tmp_path / "x").stat().st_size == 105


# Reading


def test_a_file_is_mapped(tmp_path):
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones((0, 4), np.int8), "c": np.float32(2.5)}
    entries = [Entry(name, np.shape(array), np.asarray(array).dtype) for name, array in arrays.items()]
    with mapped(tmp_path / "x", entries, {}) as targets:
        for name, array in arrays.items():
            targets[name][...] = array
    found = open_arrays(tmp_path / "x")
    for name, array in arrays.items():
        assert found[name].size == 0 or (isinstance(found[name], np.memmap) and not found[name].flags.writeable)
        np.testing.assert_array_equal(found[name], array)


def file_with(described, data):
    text = json.dumps(described).encode()
    return len(text).to_bytes(8, "little") + text + data


ARRAY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no file of safetensors, or is cut off"),
        (b"\xff" * 20, "is no file of safetensors, or is cut off"),
        (file_with({"a": ARRAY}, b"1234567"), "a is 8 bytes by its shape .2., and has bytes 0 to 8 of 7"),
        (file_with({"a": {**ARRAY, "shape": [3]}}, b"12345678"), "a is 12 bytes by its shape"),
        (file_with({"a": {**ARRAY, "dtype": "F4"}}, b"12345678"), "a has the dtype F4; read are BOOL"),
    ],
)
def test_damaged_files(tmp_path, content, message):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_arrays(tmp_path / "x")
    with pytest.raises(UserError, match="cannot be read: No such file"):
        open_arrays(tmp_path / "y")
