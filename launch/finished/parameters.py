"""Parameters of a checkpoint, read onto the layouts of any mesh: of the rest of the state nothing is read.

Each process reads the parts that its devices hold, each once, straight from the chunks on disk; then all of them
compare the arrays with the checksums that were made before the save.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...layouts.paths import leaves_with_paths
from ...layouts.sizes import counted
from ...mesh.processes import local_copy
from ...training.checkpointing.checksums import checksums
from ...training.checkpointing.errors import MAX_LISTED, CheckpointError, DamagedCheckpoint, differences, other_bits
from ..inspection.averages import averages_in
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
    held = [path for path in stored.names if path.split("/")[0] == group]
    return jax.tree.unflatten(jax.tree.structure(abstract), _read_leaves(stored, group, leaves, held))


def read_averages(stored: StoredCheckpoint, abstract: Any) -> Any:
    """Reads the averages of the parameters that a run kept (`optimizer.ema`); of what was frozen, the parameter.

    Args:
        stored: The checkpoint.
        abstract: Shapes, dtypes and shardings of the parameters, in the model's own order of blocks.

    Returns:
        Global arrays, structured, laid out and of the dtypes as `abstract`.

    Raises:
        CheckpointError: It holds no averages, or those of other parameters.
        DamagedCheckpoint: As `read_tree`.
        CheckpointUnavailable: As `read_tree`.
    """
    names = averages_in(stored)
    leaves = {}
    for path, leaf in leaves_with_paths(abstract):
        dtype = jnp.promote_types(leaf.dtype, jnp.float32) if path in names else leaf.dtype
        stored_as = names.get(path, f"params/{path}")
        leaves[stored_as] = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
    held = [path for path in (*leaves, *names.values()) if path in stored.names]
    read = jax.tree.unflatten(jax.tree.structure(abstract), _read_leaves(stored, "averages", leaves, held))
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), read, abstract)


def _read_leaves(stored: StoredCheckpoint, what: str, leaves: Mapping[str, Any], held: Sequence[str]) -> list[Any]:
    """The arrays at some paths of a checkpoint, compared with their checksums; `held` are those that it has."""
    wanted = {path: leaf for path, leaf in leaves.items() if leaf.size}
    _check_fits(stored, what, wanted, {path: stored.array(path) for path in held})
    arrays = {path: _read(stored, path, leaf) for path, leaf in wanted.items()}
    found = [arrays[path] if path in arrays else _empty(leaf) for path, leaf in leaves.items()]
    _compare(stored, {path: leaf for path, leaf in zip(leaves, found, strict=True) if leaf.size})
    return found


def _check_fits(stored: StoredCheckpoint, group: str, wanted: Mapping[str, Any], held: Mapping[str, Any]) -> None:
    problems = differences(wanted, held)
    if problems:
        more = [f"... and {len(problems) - MAX_LISTED} more"] if len(problems) > MAX_LISTED else []
        raise CheckpointError(
            f"The checkpoint {stored.folder} holds other {group} than the model of its config has, in "
            f"{counted(len(problems), 'array')}:\n  "
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
