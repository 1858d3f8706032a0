"""The safetensors format: 8 bytes of length, a header in JSON, then the arrays one after the other, little-endian.

The format is simple enough to be written here, part by part, into a file that has its whole size from the beginning:
no array is ever held whole, and a full disk is told before anything is written. The safetensors library, whose writer
holds all arrays in memory, checks the files that are read; they are then mapped: a process reads the pages that it
needs. Its specification is public: https://github.com/huggingface/safetensors.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from ...layouts.sizes import array_bytes
from ...mesh.errors import UserError

NAMES = {
    np.dtype(dtype): name
    for dtype, name in (
        (np.bool_, "BOOL"),
        (np.uint8, "U8"),
        (np.int8, "I8"),
        (np.uint16, "U16"),
        (np.int16, "I16"),
        (np.uint32, "U32"),
        (np.int32, "I32"),
        (np.uint64, "U64"),
        (np.int64, "I64"),
        (np.float16, "F16"),
        (ml_dtypes.bfloat16, "BF16"),
        (np.float32, "F32"),
        (np.float64, "F64"),
        (ml_dtypes.float8_e4m3fn, "F8_E4M3"),
        (ml_dtypes.float8_e5m2, "F8_E5M2"),
    )
}
"""What the format calls a dtype."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}
ALIGNED = 8
"""The data begins at a multiple of this, so that any array can be mapped into memory."""


class Entry(NamedTuple):
    """An array of a file.

    Attributes:
        name: Of the array.
        shape: Its shape.
        dtype: Its dtype, one of NAMES.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return array_bytes(self.shape, self.dtype)


def header(entries: Iterable[Entry], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Lays a file out.

    Args:
        entries: Its arrays; the largest elements come first, so that all are aligned.
        metadata: Texts by name, for the header.

    Returns:
        What the file begins with, and where each array begins.

    Raises:
        UserError: The format has no name for a dtype.
    """
    described: dict[str, object] = {"__metadata__": dict(metadata)}
    end, offsets = 0, {}
    for entry in sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name)):
        if entry.dtype not in NAMES:
            raise UserError(
                f"safetensors has no dtype {entry.dtype}, which {entry.name} has. Export to a folder of .npy files."
            )
        offsets[entry.name], end = end, end + entry.nbytes
        described[entry.name] = {
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offsets[entry.name], end],
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    begin = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: begin + offset for name, offset in offsets.items()}


@contextmanager
def mapped(path: Path, entries: Iterable[Entry], metadata: Mapping[str, str]) -> Iterator[dict[str, np.ndarray]]:
    """Makes a file of its whole size, and maps its arrays into memory, to be filled in any order.

    Args:
        path: The file, which must not exist.
        entries: Its arrays.
        metadata: Texts by name, for the header.

    Yields:
        The arrays by name; what is written into them is on disk when the block ends.

    Raises:
        OSError: There is no room for it.
        UserError: The format has no name for a dtype.
    """
    entries = list(entries)
    begin, offsets = header(entries, metadata)
    allocate(path, begin, sum(entry.nbytes for entry in entries))
    arrays = {
        entry.name: np.memmap(path, entry.dtype, "r+", offsets[entry.name], entry.shape)
        if entry.nbytes
        else np.empty(entry.shape, entry.dtype)
        for entry in entries
    }
    yield arrays
    for array in arrays.values():
        if isinstance(array, np.memmap):
            array.flush()


def allocate(path: Path, begin: bytes, more: int) -> None:
    """Makes a file that begins with some bytes and has room for more; a page of a mapping that has none kills.

    Raises:
        OSError: There is no room, or the file exists.
    """
    with path.open("xb") as file:
        file.write(begin)
        file.flush()
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, len(begin) + more)
            elif shutil.disk_usage(path.parent).free < more:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            else:
                file.truncate(len(begin) + more)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error


def open_arrays(path: Path) -> dict[str, np.ndarray]:
    """Maps the arrays of a file into memory, to be read when they are indexed; the safetensors library checks the file.

    Args:
        path: The file.

    Returns:
        Read-only arrays by name, all views of one mapping.

    Raises:
        UserError: The file is not in this format, is cut off, or has an array of an unknown dtype.
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
        raise UserError(f"{path} is not a safetensors file, or is cut off: {error}. Fetch it again.") from error
    described.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r") if path.stat().st_size > 8 + length else np.empty(0, np.uint8)
    arrays = {}
    for name, each in described.items():
        if each["dtype"] not in DTYPES:
            raise UserError(f"{path}: {name} has the dtype {each['dtype']}; supported are {', '.join(DTYPES)}.")
        begin, end = (8 + length + offset for offset in each["data_offsets"])
        arrays[name] = data[begin:end].view(DTYPES[each["dtype"]]).reshape(each["shape"])
    return arrays
