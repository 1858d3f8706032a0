"""The parts that adapters of all libraries share: the adapted module, its arguments, and dropout per row.

A library draws one dropout mask for all rows that it gets. On a mesh these are a device's own rows, and the same key
would drop other values than on one device. Layers stay the library's; only their masks are drawn here, from a key of
each row, so that they do not depend on the mesh.
"""

import inspect
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...layouts.sizes import counted
from ...mesh.errors import UserError
from ...parallel.model import Params

TRAINS = ("train", "training", "is_training", "enable_dropout")
EVALUATES = ("deterministic", "use_running_average", "inference", "eval")


class Adapted(NamedTuple):
    """A module of another library as two pure functions.

    Attributes:
        init: `init(key) -> (params, state)`; the state has no arrays if there are only parameters. Traced.
        call: `call(params, state, inputs, rows) -> (outputs, next state)`. Traced.
        left_out: The losses that the module collects beside its outputs, by path; `call` does not return them.
    """

    init: Callable[[Array], tuple[Params, Any]]
    call: Callable[[Params, Any, Any, "Rows"], tuple[Any, Any]]
    left_out: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of one device in one call.

    Attributes:
        key: The key of this step, the same on every device; None in evaluation.
        example: int32 (rows,), the global index of each row.
        axes: The mesh axes of the other rows of the batch; () on one device.
    """

    key: Array | None
    example: Array
    axes: tuple[str, ...]

    @property
    def training(self) -> bool:
        """True if the module is in training mode."""
        return self.key is not None

    @property
    def any_key(self) -> Array:
        """The key of this step, or a constant one in evaluation."""
        return jax.random.key(0) if self.key is None else self.key


LOSS_NAMES = re.compile("loss|aux|penalty|regulari|balanc", re.IGNORECASE)
"""Names of collected values that are losses, even in a collection of intermediate values."""


def is_loss(path: str) -> bool:
    """Returns True if the path of a collected value names a loss."""
    return LOSS_NAMES.search(path) is not None


def abstract_rows() -> Rows:
    """Returns one row in training mode, on one device, as shapes; opens no device."""
    key: Any = jax.eval_shape(jax.random.key, 0)
    example: Any = jax.ShapeDtypeStruct((1,), jnp.int32)
    return Rows(key=key, example=example, axes=())


def mode_arguments(function: Callable[..., Any], training: bool) -> dict[str, bool]:
    """Returns the keyword arguments of `function` that select training or evaluation, if it has any.

    Args:
        function: A function that the library's user calls, such as `Module.__call__`.
        training: The mode.
    """
    known = {**dict.fromkeys(TRAINS, training), **dict.fromkeys(EVALUATES, not training)}
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in known.items() if name in parameters}


def as_arguments(inputs: Any) -> tuple[Any, ...]:
    """Returns the arguments of a module: the entries of a tuple, or one argument of any other type."""
    return inputs if isinstance(inputs, tuple) else (inputs,)


def check_arguments(module: Any, inputs: Any, more: Collection[str] = ()) -> None:
    """Raises a UserError if a module cannot be called with its inputs.

    Args:
        module: A module with a `__call__`.
        inputs: The inputs, see `as_arguments`.
        more: Names of further arguments, passed if the module has them.
    """
    signature = inspect.signature(type(module).__call__)
    given = {name: None for name in more if name in signature.parameters}
    given |= mode_arguments(type(module).__call__, training=True)
    try:
        signature.bind(module, *as_arguments(inputs), **given)
    except TypeError as error:
        parameters = ", ".join([*signature.parameters][1:])
        count = counted(len(as_arguments(inputs)), "argument")
        raise UserError(
            f"{type(module).__name__}.__call__({parameters}) cannot be called with {count}: {error}. Set model.inputs "
            "to a module:function of the batch (in Python inputs=) that returns a tuple of all arguments, and give "
            "other arguments a default."
        ) from None


def row_keys(key: Array | None, example: Array) -> Array:
    """Returns a key for each row, of legacy form, which depends only on the step and the row's index.

    Args:
        key: The key of the step, the same on every device; None in evaluation, for constant keys.
        example: int32 (rows,), the global index of each row.

    Returns:
        uint32 (rows, 2).
    """
    key = jax.random.key(0) if key is None else key
    return jax.vmap(lambda index: jax.random.key_data(jax.random.fold_in(key, index)))(example)


def drop(inputs: Array, rate: float, key: Array, example: Array, shared_dims: Sequence[int] = ()) -> Array:
    """Drops values and scales the others.

    Args:
        inputs: An array with rows on dim 0, or a multiple of them if rows and further dims were merged.
        rate: The fraction of the values to drop, from 0 to 1.
        key: The key of this layer in this step, the same on every device.
        example: int32 (rows,), the global index of each row.
        shared_dims: Dims along which the mask is the same.
    """
    if rate == 0:
        return inputs
    if rate == 1:
        return jnp.zeros_like(inputs)
    rows, keep = example.shape[0], 1.0 - rate
    if inputs.shape[0] % rows:
        raise ValueError(
            f"dropout of an array of shape {inputs.shape} for {rows} rows: dim 0 must be a multiple of the rows."
        )
    shape = [
        1 if dim in {each % inputs.ndim for each in shared_dims} else size for dim, size in enumerate(inputs.shape)
    ]
    row_shape = (shape[0] // rows if shape[0] > 1 else 1, *shape[1:])

    def mask(index: Array) -> Array:
        return jax.random.bernoulli(jax.random.fold_in(key, index), keep, row_shape)

    drawn = jax.vmap(mask)(example).reshape(rows * row_shape[0], *row_shape[1:])
    drawn = jnp.broadcast_to(drawn, inputs.shape)
    return lax.select(drawn, inputs / keep, jnp.zeros_like(inputs))
