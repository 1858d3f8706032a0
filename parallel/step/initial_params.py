"""Initial parameters given by the user: checked against the model, and placed on their devices.

Each device is sent its own part alone, cut out of the host's array. So weights in memory maps may be larger than the
host's memory, and no device ever holds a whole large one.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...layouts.paths import in_blocks, leaves_with_paths, map_with_path
from ...mesh.errors import UserError, did_you_mean
from ...mesh.keys import key_of
from ..model import BlockModel, Model, Params
from ..options import cast_floats
from ..schedule.stages import Stages
from ..sharding.stored_order import StoredOrder

MAX_LISTED = 20
"""Problems listed in one message."""


def drawn(model: Model | BlockModel, dtype: str, key_data: Array) -> Params:
    """Returns the parameters drawn by the model's init, in the stored dtype. Traced.

    Args:
        model: The model, its blocks in the order in which they are stored.
        dtype: The stored dtype of floating-point parameters.
        key_data: Raw data of the run's key.
    """
    return cast_floats(model.init(key_of(key_data)), dtype)


def place(given: Params, stored: Params, order: StoredOrder) -> Params:
    """Lays out parameters that the user gives.

    Args:
        given: The whole parameters, in the model's own order of blocks and the same on every process: NumPy arrays,
            memory maps, or JAX arrays that this process holds whole or that are laid out like the step's. Floats are
            cast to the stored dtype.
        stored: Shapes, dtypes and shardings of the parameters as the step stores them.
        order: Between the model's order of blocks and the stored one.

    Returns:
        New global arrays, which share no memory with those given.

    Raises:
        UserError: A parameter is missing, is not the model's, or has another shape or kind of number; all at once.
    """
    in_model_order = order.abstract_model(stored)
    problems = list(_problems(given, in_model_order))
    if problems:
        more = [f"... and {len(problems) - MAX_LISTED} more"] if len(problems) > MAX_LISTED else []
        lines = "\n".join(f"  {line}" for line in problems[:MAX_LISTED] + more)
        raise UserError(f"Parameters that do not fit the model:\n{lines}")
    expected = dict(leaves_with_paths(in_model_order))
    laid_out = {path: leaf for path, leaf in leaves_with_paths(given) if _is_laid_out(leaf, expected[path])}
    arrays = {path: _of_host(leaf) for path, leaf in leaves_with_paths(given) if path not in laid_out}
    stages, in_order = order.reordered, dict(leaves_with_paths(stored))
    moved = order.to_stored(
        {path: jnp.copy(leaf).astype(expected[path].dtype) for path, leaf in laid_out.items()},
        {path: in_order[path] for path in laid_out},
    )

    def put(path: str, leaf: jax.ShapeDtypeStruct) -> Array:
        if path in moved:
            return moved[path]
        rows = stages if in_blocks(path) else None
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: _part(arrays[path], index, leaf.dtype, rows)
        )

    return map_with_path(put, stored)


def _is_laid_out(given: Any, leaf: jax.ShapeDtypeStruct) -> bool:
    """Checks if a parameter is on the devices of the step already, as a restored one is."""
    return isinstance(given, Array) and bool(given.size) and given.sharding == leaf.sharding


def _of_host(leaf: Any) -> np.ndarray:
    return np.asarray(leaf) if isinstance(leaf, Array) else leaf  # what is read part by part stays on disk


def _part(array: np.ndarray, index: Any, dtype: Any, stages: Stages | None) -> np.ndarray:
    """Copies one device's part of a parameter; `index` counts stored rows of blocks where there are stages."""
    if stages is None:
        return np.array(array[index], dtype)
    blocks = stages.order[index[0]]
    part = np.array(array[(np.maximum(blocks, 0), *index[1:])], dtype)
    part[blocks < 0] = 0
    return part


def _problems(given: Params, expected: Params) -> Iterator[str]:
    have, own = dict(leaves_with_paths(given)), dict(leaves_with_paths(expected))
    for path, leaf in own.items():
        if path not in have:
            yield f"{path} is missing; the model's is {_text(leaf)}. Give it, or draw it with the model's own init."
        elif _kind_and_shape(have[path]) != _kind_and_shape(leaf):
            yield f"{path} is {_text(have[path])}, but the model's is {_text(leaf)}. Give an array like it."
        elif isinstance(have[path], Array) and not (have[path].is_fully_addressable or _is_laid_out(have[path], leaf)):
            yield (
                f"{path} is split over several processes. Pass arrays that are whole on every process, or restore a "
                "checkpoint, which needs no whole array anywhere."
            )
    for path in have:
        if path not in own:
            yield f"{path} is not a parameter of the model.{did_you_mean(path, own)}"


def _kind_and_shape(leaf: Any) -> Any:
    """Returns whether an array has floating-point numbers, and its shape; False for other values."""
    return hasattr(leaf, "dtype") and (bool(jnp.issubdtype(leaf.dtype, jnp.floating)), tuple(leaf.shape))


def _text(leaf: Any) -> str:
    return f"{jnp.dtype(leaf.dtype)}{list(leaf.shape)}" if hasattr(leaf, "dtype") else f"a {type(leaf).__name__}"
