"""Safetensors files: a header in JSON, then the arrays one after the other, little-endian.

The safetensors library checks the files that are read. Two things that it cannot do are here: writing one array after
the other (its writer takes all arrays at once), and mapping every dtype into memory without reading it. The format is
public: https://github.com/huggingface/safetensors.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from ...layouts.sizes import array_bytes
from ...mesh.errors import UserError

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    **{f"{kind}{8 * size}": np.dtype(f"{kind.lower()}{size}") for kind in "IU" for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
"""The dtype of each name in the format."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 8
"""The arrays begin at a multiple of this, so that any of them can be mapped into memory."""


def write_arrays(
    path: Path, abstract: Mapping[str, jax.ShapeDtypeStruct], arrays: Iterable[np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes a file, one array after the other.

    Args:
        path: The file, which must not exist.
        abstract: Name -> shape and dtype, those with the largest elements first, so that all arrays are aligned.
        arrays: Their values, in the same order.
        metadata: Strings by name, for the header.

    Raises:
        UserError: The format does not support a dtype.
        OSError: It cannot be written.
    """
    begin = header(abstract, metadata)
    with path.open("xb") as file:
        file.write(begin)
        for (name, leaf), array in zip(abstract.items(), arrays, strict=True):
            assert (array.shape, array.dtype) == (leaf.shape, leaf.dtype), (name, leaf, array.shape, array.dtype)
            if array.size:
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def header(abstract: Mapping[str, jax.ShapeDtypeStruct], metadata: Mapping[str, str]) -> bytes:
    """Returns the bytes of a file before its arrays.

    Raises:
        UserError: The format does not support a dtype.
    """
    described: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, leaf in abstract.items():
        if leaf.dtype not in NAMES:
            raise UserError(
                f"safetensors does not support {leaf.dtype}, the dtype of {name}. Export to a directory of .npy files."
            )
        begin, end = end, end + array_bytes(leaf.shape, leaf.dtype)
        described[name] = {"dtype": NAMES[leaf.dtype], "shape": leaf.shape, "data_offsets": (begin, end)}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def open_arrays(path: Path) -> dict[str, np.ndarray]:
    """Maps the arrays of a file into memory, to be read when they are indexed; the safetensors library checks the file.

    Args:
        path: The file.

    Returns:
        Read-only arrays by name, all views of one mapping.

    Raises:
        UserError: The file is not in this format, is cut off, or has an array of an unsupported dtype.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise UserError("safetensors is not installed. Install it with: pip install 'spmdkit[huggingface]'.") from error
    try:
        with safe_open(path, framework="np"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            described = json.loads(file.read(length))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    except SafetensorError as error:
        raise UserError(f"{path} is not a safetensors file, or is cut off: {error}. Download it again.") from error
    described.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r") if path.stat().st_size > 8 + length else np.empty(0, np.uint8)
    arrays = {}
    for name, each in described.items():
        if each["dtype"] not in DTYPES:
            raise UserError(f"{path}: {name} has the dtype {each['dtype']}; supported are {', '.join(DTYPES)}.")
        begin, end = (8 + length + offset for offset in each["data_offsets"])
        arrays[name] = data[begin:end].view(DTYPES[each["dtype"]]).reshape(each["shape"])
    return arrays
