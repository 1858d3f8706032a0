"""One checkpoint on disk, read without devices: its description, and its arrays part by part.

A checkpoint is a folder `state` that Orbax has written: arrays in zarr's format, in chunks that are the shards of the
mesh that wrote them, inside TensorStore's OCDBT files, which are checked for damage when they are read. A chunk that
is missing would read as zeros; it is looked for by name.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import product
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorstore

from ...layouts.sizes import array_bytes
from ...mesh.files import absolute_path
from ...training.checkpointing.checksums import part_checksum
from ...training.checkpointing.description import check_description
from ...training.checkpointing.errors import DamagedCheckpoint, other_bits, unreadable
from ...training.checkpointing.folder import CHECKSUMS

PART_BYTES = 16 << 20
"""Small chunks are read together up to this."""
CACHE_BYTES = 64 << 20
"""Of the description of arrays, as TensorStore keeps it."""

Value = TypeVar("Value")


class StoredArray(NamedTuple):
    """An array of a checkpoint.

    Attributes:
        path: such as "params/blocks/query".
        shape: global.
        dtype: of NumPy, or of ml_dtypes where NumPy has none.
        chunk: shape of the pieces that it is stored in.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole array in memory."""
        return array_bytes(self.shape, self.dtype)


class StoredCheckpoint:
    """A checkpoint on disk; nothing but its description is read before it is asked for."""

    def __init__(self, folder: Path) -> None:
        """Opens a checkpoint.

        Args:
            folder: Named after its step.

        Raises:
            DamagedCheckpoint: Its description is missing or cannot be understood.
            CheckpointUnavailable: The machine or the file system does not let it be read.
        """
        self.folder = absolute_path(folder)
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})
        self._names = self._reading(self._described)
        self._stores: dict[str, Any] = {}

    @cached_property
    def arrays(self) -> Mapping[str, StoredArray]:
        """The arrays by path, in order, but for the checksums.

        Raises:
            DamagedCheckpoint: One is missing, or its description is damaged.
        """
        return {name: self.array(name) for name in self._names if name != CHECKSUMS}

    @property
    def names(self) -> list[str]:
        """The paths of all arrays that there should be, but for the checksums, in order."""
        return [name for name in self._names if name != CHECKSUMS]

    @property
    def parameters(self) -> list[StoredArray]:
        """The arrays below params/."""
        return [array for path, array in self.arrays.items() if path.startswith("params/")]

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """What Orbax wrote about the whole: times, and what the run said of itself; empty where that is missing."""
        try:
            return dict(json.loads((self.folder / "_CHECKPOINT_METADATA").read_bytes()))
        except (OSError, ValueError, TypeError):
            return {}

    @property
    def about(self) -> dict[str, Any]:
        """What the run said of itself, see launch/run/directory/saved_with.py; empty in those of earlier versions."""
        found = (self.metadata.get("custom_metadata") or {}).get("spmdkit")
        return found if isinstance(found, dict) else {}

    @property
    def mesh(self) -> dict[str, int]:
        """The mesh that wrote it, as Orbax notes it: axis -> size, of those over 1; empty where it does not say."""
        try:
            of_arrays = json.loads((self.folder / "state" / "_sharding").read_bytes()).values()
            first = next(each for each in map(json.loads, of_arrays) if "axis_names" in each)
            return {axis: size for axis, size in zip(first["axis_names"], first["shape"], strict=True) if size > 1}
        except (OSError, ValueError, TypeError, KeyError, StopIteration):
            return {}

    @property
    def step(self) -> int | None:
        """The number of optimizer steps done; None where the state has none."""
        array = self.arrays.get("step")
        return int(self.read("step").item()) if array is not None and array.size == 1 else None

    @cached_property
    def checksums(self) -> dict[str, int] | None:
        """Path -> what was computed before the array was saved; None in those of earlier versions."""
        if CHECKSUMS not in self._names:
            return None
        values = self._read(self.array(CHECKSUMS))
        names = sorted(self.names)
        if len(values) != len(names):
            raise DamagedCheckpoint(
                f"The checkpoint {self.folder} is damaged: it holds {len(values)} checksums for {len(names)} arrays."
            )
        return dict(zip(names, map(int, values), strict=True))

    def array(self, path: str) -> StoredArray:
        """Describes one array.

        Raises:
            DamagedCheckpoint: It is missing, or its description is damaged.
        """
        store = self._store(path)
        shape = tuple(map(int, store.shape))
        chunk = tuple(int(size or 1) for size in store.chunk_layout.read_chunk.shape or shape)
        return StoredArray(path, shape, np.dtype(store.dtype.numpy_dtype), chunk)

    def read(self, path: str) -> np.ndarray:
        """Reads a whole array, and compares it with its checksum where there is one.

        Raises:
            DamagedCheckpoint: It cannot be read, or has other bits than were saved.
            CheckpointUnavailable: The machine or the file system does not let it be read.
        """
        array = self.arrays[path]
        whole = np.empty(array.shape, array.dtype)
        for region, part in self.parts(path):
            whole[region] = part
        return whole

    def parts(self, path: str) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """Reads an array part by part, in C order of the parts; compares it with its checksum at the end.

        Yields:
            Where the part lies, and the part.

        Raises:
            DamagedCheckpoint: It cannot be read; or, after the last part, it has other bits than were saved.
            CheckpointUnavailable: The machine or the file system does not let it be read.
        """
        array, found = self.arrays[path], 0
        for region in _regions(array):
            part = self._read(array, region)
            found += part_checksum(part, [each.start for each in region], array.shape)
            yield region, part
        self.compare(path, found)

    def compare(self, path: str, checksum: int) -> None:
        """Compares the sum of what the parts of an array add to its checksum with what was saved, if that is known.

        Raises:
            DamagedCheckpoint: It is another.
        """
        if self.checksums is not None and self.checksums[path] != checksum % 2**32:
            raise DamagedCheckpoint(other_bits(self.folder, [path], len(self.names)))

    def part(self, path: str, region: tuple[slice, ...]) -> np.ndarray:
        """Reads one part of an array; to compare it is the caller's."""
        return self._read(self.array(path), region)

    def missing_chunks(self, path: str) -> int:
        """Counts the chunks of an array that are not there; they would read as zeros."""
        array = self.array(path)
        wanted = prod(ceil(size / chunk) for size, chunk in zip(array.shape, array.chunk, strict=True))
        return self._reading(lambda: wanted - len(self._files.list(_below(path)).result()) + 1)  # beside .zarray

    def _read(self, array: StoredArray, region: tuple[slice, ...] = ()) -> np.ndarray:
        read = self._store(array.path)[region] if region else self._store(array.path)
        return np.asarray(self._reading(lambda: read.read().result()))

    @cached_property
    def _files(self) -> Any:
        spec = {"driver": "ocdbt", "base": self._base, "cache_pool": "cache_pool"}
        return tensorstore.KvStore.open(spec, context=self._context).result()

    @property
    def _base(self) -> dict[str, str]:
        return {"driver": "file", "path": f"{self.folder / 'state'}/"}

    def _store(self, path: str) -> Any:
        if path not in self._stores:
            kvstore = {"driver": "ocdbt", "base": self._base, "path": f"{path}/"}
            spec = {"driver": "zarr", "kvstore": kvstore, "recheck_cached_data": False}
            self._stores[path] = self._reading(
                lambda: tensorstore.open(spec, open=True, read=True, context=self._context).result()
            )
        return self._stores[path]

    def _described(self) -> list[str]:
        """The paths of all arrays, as the checkpoint's description lists them."""
        self.is_described = check_description(self.folder)
        text = (self.folder / "state" / "_METADATA").read_bytes()
        entries = json.loads(text)["tree_metadata"].values()
        return ["/".join(each["key"] for each in entry["key_metadata"]) for entry in entries]

    def _reading(self, action: Any) -> Any:
        try:
            return action()
        except Exception as error:
            meant = unreadable(self.folder, error)
            if meant is error:
                raise
            raise meant from error


def _below(path: str) -> Any:
    return tensorstore.KvStore.KeyRange(f"{path}/", f"{path}0")  # "0" follows "/"


def _regions(array: StoredArray) -> Iterator[tuple[slice, ...]]:
    """Boxes that make up an array, in C order: whole chunks, small ones together."""
    box = [max(1, min(size, chunk)) for size, chunk in zip(array.shape, array.chunk, strict=True)]
    for dim in reversed(range(len(box))):
        while box[dim] < array.shape[dim] and 2 * array_bytes(box, array.dtype) <= PART_BYTES:
            box[dim] = min(2 * box[dim], array.shape[dim])
    starts = (range(0, size, step) for size, step in zip(array.shape, box, strict=True))
    for origin in product(*starts):
        yield tuple(
            slice(start, min(start + step, size)) for start, step, size in zip(origin, box, array.shape, strict=True)
        )
