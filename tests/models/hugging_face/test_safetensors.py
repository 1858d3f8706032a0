"""The safetensors library reads what is written, and checks what is read."""

import json

import jax
import numpy as np
import pytest
from safetensors import deserialize, safe_open
from spmdkit.mesh.errors import UserError
from spmdkit.models.hugging_face.safetensors import DTYPES, NAMES, header, open_arrays, write_arrays


def write(path, arrays, **metadata):
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    abstract = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}
    write_arrays(path, abstract, arrays.values(), metadata)
    return path


def test_every_dtype_reads_back(tmp_path):
    arrays = {f"a/{name}": np.arange(6).reshape(2, 3).astype(dtype) for dtype, name in NAMES.items()}
    arrays["scalar"] = np.float32(2.5)
    write(tmp_path / "x", arrays, step="3")
    with safe_open(tmp_path / "x", framework="np") as file:
        assert file.metadata() == {"step": "3"}
    found = {
        name: np.frombuffer(each["data"], DTYPES[each["dtype"]]).reshape(each["shape"])
        for name, each in deserialize((tmp_path / "x").read_bytes())
    }
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == np.asarray(array).dtype
        np.testing.assert_array_equal(found[name], array)


def test_arrays_begin_at_a_multiple_of_8_bytes():
    for name in ("x", "xy", "xyz"):
        assert len(header({name: jax.ShapeDtypeStruct((3,), np.uint8)}, {})) % 8 == 0


def test_rejects_unsupported_dtypes():
    with pytest.raises(UserError, match=r"safetensors does not support complex64, the dtype of c\. Export to a dir"):
        header({"c": jax.ShapeDtypeStruct((1,), np.complex64)}, {})


# Reading


def test_open_arrays_maps_the_file(tmp_path):
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones((0, 4), np.int8), "c": np.float32(2.5)}
    found = open_arrays(write(tmp_path / "x", arrays))
    for name, array in arrays.items():
        assert found[name].size == 0 or (isinstance(found[name], np.memmap) and not found[name].flags.writeable)
        np.testing.assert_array_equal(found[name], array)


def file_with(described, data):
    text = json.dumps(described).encode()
    return len(text).to_bytes(8, "little") + text + data


ARRAY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


DAMAGED = {
    "nothing": b"",
    "a header of a list": file_with([], b""),
    "another shape": file_with({"a": {**ARRAY, "shape": [3]}}, b"12345678"),
    "too few bytes": file_with({"a": ARRAY}, b"1234567"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_rejects_damaged_files(name, tmp_path):
    (tmp_path / "x").write_bytes(DAMAGED[name])
    with pytest.raises(UserError, match=r"x is not a safetensors file, or is cut off: .*Download it again"):
        open_arrays(tmp_path / "x")


def test_rejects_missing_files_and_unknown_dtypes(tmp_path):
    with pytest.raises(UserError, match="cannot be read: No such file"):
        open_arrays(tmp_path / "y")
    (tmp_path / "x").write_bytes(file_with({"a": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}, b"12345678"))
    with pytest.raises(UserError, match="a has the dtype C64; supported are BOOL"):
        open_arrays(tmp_path / "x")
