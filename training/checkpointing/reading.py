"""Reading a checkpoint: what it holds, by path, onto the shardings of this run, compared with its checksums."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from ...layouts.paths import leaves_with_paths
from ...mesh.processes import local_copy
from .checksums import checksums
from .description import check_description
from .errors import DamagedCheckpoint, differences, mismatch, other_bits, unreadable
from .folder import CHECKSUMS, STATE

ABOUT, NOTES = "spmdkit", "notes"
"""Where the description of a checkpoint keeps what its run says of itself, and the notes of a save."""


class Reader:
    """Reads checkpoints as the state of one run."""

    def __init__(self, orbax: ocp.AsyncCheckpointer, abstract_state: Any) -> None:
        """Takes what reads, and what it is read as.

        Args:
            orbax: Of the run.
            abstract_state: The state as a pytree of ShapeDtypeStructs whose shardings are those of this run.
        """
        self._orbax = orbax
        self._abstract_state = abstract_state

    def description(self, folder: Path) -> dict[str, Any]:
        """What a checkpoint holds, which has to be what this run needs: path -> something with a shape and a dtype.

        Raises:
            CheckpointError: Its arrays are not those of the state; every path that differs is named.
            DamagedCheckpoint: It cannot be understood.
            CheckpointUnavailable: The machine or the file system does not let it be read.
        """
        found = _reading(folder, lambda: _arrays_in(self._orbax, folder))
        held = {path: array for path, array in found.items() if path != CHECKSUMS}
        problems = differences(stored(self._abstract_state), held)
        if problems:
            raise mismatch(folder, problems)
        return found

    def arrays(self, folder: Path) -> dict[str, Any]:
        """The arrays by path, with their checksums where there are some; waits for no other process.

        Raises:
            CheckpointError, DamagedCheckpoint, CheckpointUnavailable: As `description`.
        """
        request = stored(self._abstract_state)
        if CHECKSUMS in self.description(folder):  # those of earlier versions have none
            request[CHECKSUMS] = _abstract_checksums(request)
        how = ocp.checkpoint_utils.construct_restore_args(request)
        asked = ocp.args.PyTreeRestore(request, restore_args=how)  # pyright: ignore[reportCallIssue]
        # Of the checkpointer's own `restore` the rest is a barrier: whoever finds no damage would wait for who does.
        handler, path = self._orbax.handler, epath.Path(folder)
        return dict(_reading(folder, lambda: handler.restore(path, args=ocp.args.Composite(state=asked)))["state"])

    def checked_state(self, folder: Path, arrays: Mapping[str, Any]) -> Any:
        """Puts the arrays into the structure of the state, and compares that with the checksums by path.

        All processes call this together.

        Raises:
            DamagedCheckpoint: Some arrays have other bits than were saved; they are named.
        """
        state = self._as_state(arrays)
        if CHECKSUMS in arrays:
            compare_checksums(folder, arrays[CHECKSUMS], stored(state))
        return state

    def _as_state(self, arrays: Mapping[str, Any]) -> Any:
        wanted = leaves_with_paths(self._abstract_state)
        leaves = [arrays[path] if path in arrays else _empty(leaf) for path, leaf in wanted]
        return jax.tree.unflatten(jax.tree.structure(self._abstract_state), leaves)

    def notes(self, folder: Path) -> dict[str, Any]:
        """The notes that a checkpoint was saved with; nothing where it has none.

        Raises:
            DamagedCheckpoint: Its description is missing or cannot be understood.
            CheckpointUnavailable: The machine or the file system does not let it be read.
        """

        def read() -> Any:
            check_description(folder)
            return self._orbax.metadata(folder).custom_metadata

        return dict((_reading(folder, read) or {}).get(NOTES) or {})


def stored(state: Any) -> dict[str, Any]:
    """The arrays by path; arrays without elements cannot be stored and need not be."""
    return {path: leaf for path, leaf in leaves_with_paths(state) if leaf.size}


def compare_checksums(folder: Path, saved: Any, arrays: Mapping[str, Any]) -> None:
    """Compares restored arrays with their checksums; all processes do it together.

    Args:
        folder: The checkpoint.
        saved: The checksums in the order of the sorted paths.
        arrays: The arrays by path.

    Raises:
        DamagedCheckpoint: Some have other bits; they are named.
    """
    expected, found = (np.asarray(jax.device_get(local_copy(each))) for each in (saved, checksums(arrays)))
    wrong = [path for path, same in zip(sorted(arrays), expected == found, strict=True) if not same]
    if wrong:
        raise DamagedCheckpoint(other_bits(folder, wrong, len(arrays)))


def _reading(folder: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:
        meant = unreadable(folder, error)
        if meant is error:
            raise
        raise meant from error


def _arrays_in(orbax: ocp.AsyncCheckpointer, folder: Path) -> dict[str, Any]:
    """What a checkpoint holds, without reading it: path -> something with a shape and a dtype."""
    check_description(folder)
    (folder / STATE / "_METADATA").read_bytes()  # Orbax takes what it may not read for something that is not there
    os.listdir(folder)  # Orbax takes what may not be read for what is not there
    items = orbax.metadata(folder).item_metadata
    if items is None or items["state"] is None:
        raise OSError("its description is missing")
    return dict(items["state"].tree)


def _abstract_checksums(stored: Mapping[str, Any]) -> jax.ShapeDtypeStruct:
    """The array of checksums as it is restored: whole on every device of the state."""
    sharding = next((leaf.sharding for leaf in stored.values()), None)
    if isinstance(sharding, jax.sharding.NamedSharding):
        sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return jax.ShapeDtypeStruct((len(stored) or 1,), jnp.uint32, sharding=sharding)


def _empty(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
