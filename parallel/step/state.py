"""The input and output of a step: the train state and its initial parameters, and the metrics."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ...layouts.paths import in_blocks, leaves_with_paths, map_with_path
from ...layouts.sizes import array_bytes, format_bytes
from ...mesh.compat import varying_axes
from ...mesh.errors import counted, did_you_mean, raise_problems
from ...mesh.keys import WORDS, key_of
from ..model import Params, has_state
from ..options import cast_floats
from ..schedule.stages import Stages
from ..sharding.stored_order import StoredOrder

MAX_LISTED = 20
"""The maximum number of problems in one message."""


class TrainState(NamedTuple):
    """A snapshot of everything that changes from step to step.

    Attributes:
        step: The number of completed optimizer steps, an int32 scalar on every device. It determines the position in
            the data: step s starts at sample s * global_batch.
        params: The parameters, in the layouts of the layout table and the stored dtype.
        opt_state: The optimizer's state; each moment has the layout of its parameter.
        key: The raw data of the run's random key, uint32 (2,), on every device. It does not change; each step folds in
            its number. Always threefry2x32, independent of JAX's default generator (see `mesh/keys.py`).
        extra: The state of strategies for slow links: `diloco.Copies`, `compression.Errors`, or ().
        model_state: The model's state without gradients (`Model.init_state`), whole on every device, or ().
        loss_scale: The state of dynamic loss scaling (`loss_scaling.LossScale`), on every device, or ().
        order: The order in which pipeline stages store the blocks. It has no array: it is part of the structure of the
            tree, so that a state of one pipeline is not mistaken for that of another.
    """

    step: Array
    params: Params
    opt_state: Any
    key: Array
    extra: Any = ()
    model_state: Any = ()
    loss_scale: Any = ()
    order: StoredOrder = StoredOrder()

    def __repr__(self) -> str:
        parts = []
        for name, value in self._asdict().items():
            leaves = [leaf for leaf in jax.tree.leaves(value) if hasattr(leaf, "dtype")]
            if leaves:
                size = sum(array_bytes(leaf.shape, leaf.dtype) for leaf in leaves)
                parts.append(f"{name}: {counted(len(leaves), 'array')}, {format_bytes(size)}")
        return f"TrainState({'; '.join(parts)})"


class StepMetrics(NamedTuple):
    """The metrics of one step; scalars, the same on every device.

    Attributes:
        loss: The weighted mean of the loss over the global batch, before the update.
        grad_norm: The global norm of the gradients, before clipping.
        weight: The weight of the global batch (for a language model, its tokens).
        model: The model's own metrics by name: weighted means over the global batch.
        loss_scale: The factor of the loss under dynamic loss scaling, otherwise ().
    """

    loss: Array
    grad_norm: Array
    weight: Array
    model: Mapping[str, Any] = {}
    loss_scale: Any = ()

    @property
    def further(self) -> dict[str, Any]:
        """The metrics other than loss, norm and weight, by name."""
        return dict(self.model) if isinstance(self.loss_scale, tuple) else {**self.model, "loss_scale": self.loss_scale}


def with_means(metrics: StepMetrics, loss_scale: Any = ()) -> StepMetrics:
    """Divides each pair of sums in the model's own metrics: a mean, or 0 if nothing has weight.

    Args:
        metrics: The metrics of one step.
        loss_scale: `TrainState.loss_scale` before the step.
    """
    means = {name: total / jnp.where(weight == 0, 1, weight) for name, (total, weight) in metrics.model.items()}
    return metrics._replace(model=means, loss_scale=loss_scale.scale if loss_scale else ())


def abstract_model_state(model: Any, dtype: str) -> Any:
    """Returns the shapes and dtypes of a model's state as a run stores it; () if it does not have one.

    Args:
        model: Any model.
        dtype: The stored dtype of floating-point arrays, that of the parameters.
    """
    key_data = jax.ShapeDtypeStruct((WORDS,), jnp.uint32)
    return jax.eval_shape(partial(first_model_state, model, dtype), key_data) if has_state(model) else ()


def first_model_state(model: Any, dtype: str, key_data: Array) -> Any:
    """Returns the initial state of a model that has one. Traced; `key_data` is the raw data of the run's key."""
    state = cast_floats(model.init_state(key_of(key_data)), dtype)
    return jax.tree.map(lambda leaf: lax.convert_element_type(leaf, leaf.dtype), state)


def reduce_model_state(found: Any, state: Any, axes: tuple[str, ...], *, typed: bool) -> Any:
    """Returns the next state of a model, the same on every device. Runs inside `shard_map`.

    Floating-point arrays are averaged over the devices that sum gradients; of others, the maximum is used. An array
    that does not vary over the mesh, such as statistics that are already reduced over `batch_axes()`, is not moved.

    Args:
        found: The state returned by this device's loss.
        state: The previous state, which determines the dtypes.
        axes: The mesh axes over which devices have shares of the loss.
        typed: Whether JAX knows what varies over the mesh; if not, everything is assumed to vary.
    """

    def reduce_leaf(leaf: Any, before: Array) -> Array:
        leaf = jnp.asarray(leaf)
        over = tuple(axis for axis in axes if not typed or axis in varying_axes(leaf))
        if over and jnp.issubdtype(leaf.dtype, jnp.inexact):
            leaf = lax.pmean(leaf, over)
        elif over:
            leaf = lax.pmax(leaf.astype(jnp.promote_types(leaf.dtype, jnp.uint8)), over)
        return lax.convert_element_type(leaf, before.dtype)  # not a weak type, so that the next step reuses the program

    return jax.tree.map(reduce_leaf, found, state)


def place_params(given: Params, stored: Params, order: StoredOrder) -> Params:
    """Lays out parameters that the user gives.

    Each device receives only its own part, cut out of the host's array. Memory-mapped weights can therefore be larger
    than the host's memory, and no device ever holds a whole large array.

    Args:
        given: The whole parameters, with blocks in the model's order, the same on every process: NumPy arrays, memory
            maps, or JAX arrays that this process holds whole or that have the step's layouts. Floating-point arrays are
            cast to the stored dtype.
        stored: The shapes, dtypes and shardings of the step's parameters.
        order: The conversion between the model's order of blocks and the stored order.

    Returns:
        New global arrays, which do not share memory with the given ones.

    Raises:
        UserError: Parameters are missing or unknown, or have another shape or kind of number; the message lists all.
    """
    in_model_order = order.abstract_model(stored)
    raise_problems(_problems(given, in_model_order), "Parameters that do not fit the model:", MAX_LISTED)
    expected = dict(leaves_with_paths(in_model_order))
    laid_out = {path: leaf for path, leaf in leaves_with_paths(given) if _is_laid_out(leaf, expected[path])}
    whole = {path: leaf for path, leaf in leaves_with_paths(given) if path not in laid_out}
    # Memory maps stay on disk and are read part by part.
    arrays = {path: np.asarray(leaf) if isinstance(leaf, Array) else leaf for path, leaf in whole.items()}
    in_order = dict(leaves_with_paths(stored))
    moved = order.to_stored(
        {path: jnp.copy(leaf).astype(expected[path].dtype) for path, leaf in laid_out.items()},
        {path: in_order[path] for path in laid_out},
    )

    def put(path: str, leaf: jax.ShapeDtypeStruct) -> Array:
        if path in moved:
            return moved[path]
        rows = order.stages if in_blocks(path) else None
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: _part(arrays[path], index, leaf.dtype, rows)
        )

    return map_with_path(put, stored)


def _is_laid_out(given: Any, leaf: jax.ShapeDtypeStruct) -> bool:
    """Returns whether a parameter already has the layout of the step, as a restored one does."""
    return isinstance(given, Array) and bool(given.size) and given.sharding == leaf.sharding


def _part(array: np.ndarray, index: Any, dtype: Any, stages: Stages | None) -> np.ndarray:
    """Copies one device's part of a parameter; with stages, `index` counts blocks in the stored order."""
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
            yield f"{path} is missing, expected {_text(leaf)}. Pass it, or draw it with the model's own init."
        elif _kind_and_shape(have[path]) != _kind_and_shape(leaf):
            yield f"{path} is {_text(have[path])}, expected {_text(leaf)}, as in the model."
        elif isinstance(have[path], Array) and not (have[path].is_fully_addressable or _is_laid_out(have[path], leaf)):
            yield (
                f"{path} is split over several processes. Pass arrays that are whole on every process, or restore a "
                "checkpoint, which does not need whole arrays."
            )
    for path in have:
        if path not in own:
            yield f"{path} is not a parameter of the model.{did_you_mean(path, own)}"


def _kind_and_shape(leaf: Any) -> Any:
    """Returns (whether an array has floating-point numbers, its shape); False for values other than arrays."""
    return hasattr(leaf, "dtype") and (bool(jnp.issubdtype(leaf.dtype, jnp.floating)), tuple(leaf.shape))


def _text(leaf: Any) -> str:
    return f"{jnp.dtype(leaf.dtype)}{list(leaf.shape)}" if hasattr(leaf, "dtype") else f"a {type(leaf).__name__}"
