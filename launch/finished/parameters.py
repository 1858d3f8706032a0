"""Parameters of a checkpoint, read onto the layouts of any mesh: of the rest of the state nothing is read.

Each process reads the parts that its devices hold, each once, straight from the chunks on disk; then all of them
compare the arrays with the checksums that were made before the save.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...layouts.paths import leaves_with_paths
from ...mesh.processes import local_copy
from ...training.checkpointing.checksums import checksums
from ...training.checkpointing.errors import MAX_LISTED, CheckpointError, DamagedCheckpoint, differences, other_bits
from ..inspection.stored import StoredCheckpoint


def read_tree(stored: StoredCheckpoint, group: str, abstract: Any) -> Any:
    """Reads one part of the state that a checkpoint holds.

    Args:
        stored: The checkpoint.
        group: "params", or another field of the train state.
        abstract: Its shapes, dtypes and shardings, in the model's own order of blocks.

    Returns:
        Global arrays, structured and laid out like `abstract`.

    Raises:
        CheckpointError: The arrays of the checkpoint are not these; every path that differs is named.
        DamagedCheckpoint: An array cannot be read, or has other bits than were saved.
        CheckpointUnavailable: The machine or the file system does not let it be read.
    """
    leaves = {f"{group}/{path}" if path else group: leaf for path, leaf in leaves_with_paths(abstract)}
    wanted = {path: leaf for path, leaf in leaves.items() if leaf.size}
    _check_fits(stored, group, wanted)
    arrays = {path: _read(stored, path, leaf) for path, leaf in wanted.items()}
    _compare(stored, arrays)
    whole = [arrays[path] if path in arrays else _empty(leaf) for path, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(abstract), whole)


def _check_fits(stored: StoredCheckpoint, group: str, wanted: Mapping[str, Any]) -> None:
    held = {path: stored.array(path) for path in stored.names if path.split("/")[0] == group}
    problems = differences(wanted, held)
    if problems:
        more = [f"... and {len(problems) - MAX_LISTED} more"] if len(problems) > MAX_LISTED else []
        raise CheckpointError(
            f"The checkpoint {stored.folder} holds other {group} than the model of its config has, in "
            f"{len(problems)} array(s):\n  "
            + "\n  ".join(problems[:MAX_LISTED] + more)
            + "\nSet model and precision.params back to what wrote it, and data where that tells the model its sizes."
        )


def _read(stored: StoredCheckpoint, path: str, leaf: Any) -> jax.Array:
    """One global array; a part that several devices of this process hold is read once."""
    if stored.checksums is None and stored.missing_chunks(path):
        raise DamagedCheckpoint(f"The checkpoint {stored.folder} is damaged: pieces of {path} are missing.")
    parts: dict[Any, np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        bounds = tuple(each.indices(size)[:2] for each, size in zip(index, leaf.shape, strict=True))
        if bounds not in parts:
            parts[bounds] = stored.part(path, tuple(slice(*each) for each in bounds))
        return parts[bounds]

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)


def _compare(stored: StoredCheckpoint, arrays: Mapping[str, jax.Array]) -> None:
    """Compares arrays with their checksums; all processes do it together, since each has a part of them."""
    expected = stored.checksums
    if expected is None or not arrays:
        return
    found = np.asarray(jax.device_get(local_copy(checksums(arrays))))
    wrong = [path for path, each in zip(sorted(arrays), found, strict=True) if int(each) != expected[path]]
    if wrong:
        raise DamagedCheckpoint(other_bits(stored.folder, wrong, len(arrays)))


def _empty(leaf: Any) -> jax.Array:
    return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
