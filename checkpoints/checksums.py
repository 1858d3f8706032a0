"""Checksums over every byte of a checkpoint that a resume reads.

Arrays: for the words x[i] of an array, global index i in row-major order, all arithmetic modulo 2**32:

    checksum = sum over i of mix(x[i] + mix(i))

An integer sum does not depend on how an array is split, so that every mesh computes the same checksum, and no array is
ever gathered. An array of 16 or 8 bits counts each element as one word, one of 64 bits as two. A changed word changes
its own term; two swapped words change both. The checksum is computed on the devices before the save and after the
restore: it covers writing, the disk, reading and resharding.

Files: description.json contains what the run noted, these checksums, and the SHA-256 of each file that describes the
arrays:

    {"description": {"step", "about", "notes", "checksums": {path: checksum}, "saved", "files": {name: SHA-256}},
     "sha256": of the description}
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import Array, lax

from ..mesh.processes import local_copy
from .damage import DamagedCheckpoint
from .directory import DESCRIPTION, STATE

WORD_DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}
"""Bytes of an element -> the dtype of its words."""
MAX_WORDS = 1 << 22
"""Words that the host checksums at once."""
DATA = ("d/", "ocdbt.process_", "commit_success")
"""Prefixes of the files that the checksums of the arrays cover, and of one that nothing reads."""


@jax.jit
def checksums(arrays: Mapping[str, Array]) -> Array:
    """Computes the checksum of each array on its devices.

    Args:
        arrays: Global arrays by path, on any mesh.

    Returns:
        (number of arrays,) uint32, in the order of the sorted paths.
    """
    # Arrays of one shape and dtype share a trace.
    return jnp.stack([jax.jit(_checksum)(arrays[path]) for path in sorted(arrays)] or [jnp.uint32(0)])


def checksums_by_path(arrays: Mapping[str, Array]) -> dict[str, int]:
    """Returns the checksum of each array by path, after waiting for it; all processes call this together."""
    return dict(zip(sorted(arrays), map(int, np.asarray(local_copy(checksums(arrays)))), strict=False))


def host_checksum(array: np.ndarray) -> int:
    """Computes the checksum of a whole array on the host, without a device."""
    flat = np.ascontiguousarray(array).reshape(-1)
    words = flat.astype(np.uint8) if flat.dtype == np.bool_ else flat.view(WORD_DTYPES[flat.dtype.itemsize])
    total = 0
    for start in range(0, words.size, MAX_WORDS):
        part = words[start : start + MAX_WORDS].astype(np.uint32)
        index = np.arange(start, start + part.size, dtype=np.uint64).astype(np.uint32)
        total += int(np.sum(_mix(part + _mix(index)), dtype=np.uint32))
    return total % 2**32


def _checksum(array: Array) -> Array:
    if array.dtype == jnp.bool_:
        words = array.astype(jnp.uint32)
    else:
        words = lax.bitcast_convert_type(array, WORD_DTYPES[array.dtype.itemsize]).astype(jnp.uint32)
    index = jnp.zeros(words.shape, jnp.uint32)
    for dim in range(words.ndim):
        stride = prod(words.shape[dim + 1 :]) % 2**32
        index = index + lax.broadcasted_iota(jnp.uint32, words.shape, dim) * jnp.uint32(stride)
    return jnp.sum(_mix(words + _mix(index)), dtype=jnp.uint32)


def _mix(words: Any) -> Any:
    """Spreads each bit of a word over all of them (C. Wellons 2018, "Prospecting for Hash Functions", lowbias32)."""
    words = (words ^ (words >> 16)) * np.uint32(0x7FEB352D)
    words = (words ^ (words >> 15)) * np.uint32(0x846CA68B)
    return words ^ (words >> 16)


def with_description(
    handler: ocp.CompositeCheckpointHandler, describe: Callable[[], Mapping[str, Any]]
) -> ocp.CompositeCheckpointHandler:
    """Returns a handler that also writes description.json, as the last file before the commit.

    Orbax finds its handlers by their exact class, so that a method of this one is replaced.

    Args:
        handler: Writes checkpoints; process 0 calls its `finalize` after all processes have written.
        describe: Returns `step`, `about`, `notes` and `checksums` of the current save.
    """
    finalize = handler.finalize

    def finalize_with_description(directory: Any) -> None:
        finalize(directory)
        state = Path(directory, STATE)
        names = sorted(each.relative_to(state).as_posix() for each in state.rglob("*") if each.is_file())
        files = {name: _sha256((state / name).read_bytes()) for name in names if not name.startswith(DATA)}
        saved = round(time.time(), 6)  # of more digits, two texts can be the same number
        description = {**describe(), "saved": saved, "files": files}
        content = {"description": description, "sha256": _sha256_of_values(description)}
        Path(directory, DESCRIPTION).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    handler.finalize = finalize_with_description
    return handler


def read_description(folder: Path) -> dict[str, Any]:
    """Reads the description of a checkpoint, and checks it and the files that it lists.

    Args:
        folder: The checkpoint.

    Returns:
        `step`, `about` (plain values about the run that saved it), `notes` (plain values of this save), `checksums`
        (path -> checksum) and `saved` (seconds since 1970 when it was complete).

    Raises:
        DamagedCheckpoint: A file was changed.
        OSError: A file is missing or cannot be read.
    """
    text = (folder / DESCRIPTION).read_bytes()
    try:
        content = json.loads(text)
        description = content["description"]
        is_same = content["sha256"] == _sha256_of_values(description)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _changed(folder, DESCRIPTION) from error
    if not is_same:
        raise _changed(folder, DESCRIPTION)
    for name, saved in description["files"].items():
        if _sha256((folder / STATE / name).read_bytes()) != saved:
            raise _changed(folder, f"{STATE}/{name}")
    return description


def _sha256_of_values(values: Mapping[str, Any]) -> str:
    return _sha256(json.dumps(values, sort_keys=True).encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _changed(folder: Path, name: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"The checkpoint {folder} is damaged: {name} contains other bytes than were saved (its checksum differs)."
    )
