"""Sums of a module's outputs: losses and metrics of every row, weighted by the batch.

loss(outputs, batch) -> one number for each row, or for each position of each row
total  = sum(weights * loss)         weight = sum(weights)         weights: those of the batch, else 1
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ...mesh.errors import UserError, did_you_mean
from ...parallel.model.user_errors import accepts, locate_function

RowFunction = Callable[[Any, Mapping[str, Array]], Any]
"""(outputs, batch) -> numbers of rows."""


def softmax_cross_entropy(outputs: Any, batch: Mapping[str, Array]) -> Array:
    """Returns the cross-entropy of logits (..., classes) and integers `batch["targets"]`."""
    targets = _targets("softmax_cross_entropy", outputs, batch)
    if not jnp.issubdtype(targets.dtype, jnp.integer) or outputs.shape[:-1] != targets.shape:
        one_hot = outputs.shape == targets.shape
        remedy = "Give the number of the class instead of one-hot rows: targets.argmax(-1)" if one_hot else ""
        raise _unfit("softmax_cross_entropy", "logits (..., classes) with integers (...)", outputs, targets, remedy)
    return optax.softmax_cross_entropy_with_integer_labels(outputs, targets)


def sigmoid_cross_entropy(outputs: Any, batch: Mapping[str, Array]) -> Array:
    """Returns the cross-entropy of logits and 0 or 1 in `batch["targets"]`, with as many elements; one for each row."""
    return _of_rows("sigmoid_cross_entropy", optax.sigmoid_binary_cross_entropy, outputs, batch)


def squared_error(outputs: Any, batch: Mapping[str, Array]) -> Array:
    """Returns the squared difference from `batch["targets"]`, with as many elements; the mean of each row."""
    return _of_rows("squared_error", lambda found, wanted: (found - wanted) ** 2, outputs, batch)


def accuracy(outputs: Any, batch: Mapping[str, Array]) -> Array:
    """Returns 1 if the largest logit is that of `batch["targets"]`, else 0; a single logit above 0 means class 1."""
    targets = _targets("accuracy", outputs, batch)
    if outputs.size == targets.size:
        return (outputs.reshape(targets.shape) > 0) == (targets > 0.5)
    if outputs.shape[:-1] != targets.shape:
        raise _unfit("accuracy", "logits (..., classes) with the numbers of classes (...)", outputs, targets)
    return jnp.argmax(outputs, axis=-1) == targets


NAMED: dict[str, RowFunction] = {
    each.__name__: each for each in (softmax_cross_entropy, sigmoid_cross_entropy, squared_error, accuracy)
}
"""Losses and metrics with a name in a config."""


def row_function(given: Any, key: str) -> RowFunction:
    """Returns a function of rows by its name, or the given function.

    Args:
        given: A function, or one of `NAMED`.
        key: The config key, for messages.

    Raises:
        UserError: The name is unknown.
    """
    if callable(given):
        if not accepts(given, 2):
            raise UserError(f"{key} must take (outputs, batch); the function {locate_function(given)} does not.")
        return given
    if given not in list(NAMED):  # also of types that are not hashable
        near = did_you_mean(str(given), list(NAMED), otherwise="Choose from")
        raise UserError(
            f"{key}={given!r} is not a valid loss.{near} Your own is a function (outputs, batch) -> one for each row."
        )
    return NAMED[given]


def sums(function: RowFunction, outputs: Any, batch: Mapping[str, Array], key: str) -> tuple[Array, Array]:
    """Returns the weighted sum of a function of rows, and the sum of the weights.

    Args:
        function: A function of rows.
        outputs: The module's outputs for the batch.
        batch: Rows on dim 0; "weights" (rows, ...) if they are not all 1.
        key: The config key of the function, for messages.

    Raises:
        UserError: The function did not return real numbers per row.
    """
    values = function(outputs, batch)
    rows = next(iter(batch.values())).shape[0]
    shape = getattr(values, "shape", None)
    if shape is None or shape[:1] != (rows,):
        given = f"an array of shape {shape}" if shape is not None else f"a {type(values).__name__}"
        raise UserError(
            f"{key} returned {given} for {rows} rows. It must return one number for each row (or for each position "
            "of each row), without summing or averaging over rows: the runtime weights them and divides once, by the "
            "weight of the global batch."
        )
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        raise UserError(f"{key} returned {values.dtype}. Return real numbers, such as jnp.abs(...).")
    if key == "loss" and not jnp.issubdtype(values.dtype, jnp.floating):
        raise UserError(f"{key} returned {values.dtype}, which is not differentiable. Return floating-point numbers.")
    weights = batch.get("weights", jnp.ones(rows, jnp.float32))
    floats = [array.dtype for array in (values, weights) if jnp.issubdtype(array.dtype, jnp.floating)]
    dtype = jnp.result_type(jnp.float32, *floats)
    values, weights = values.astype(dtype), weights.astype(dtype)
    if weights.ndim > values.ndim:
        raise UserError(
            f"{key} returned an array of shape {values.shape}, and the batch has weights of shape {weights.shape}. "
            "Return one number for each weight."
        )
    weights = jnp.broadcast_to(weights.reshape(*weights.shape, *[1] * (values.ndim - weights.ndim)), values.shape)
    return (values * weights).sum(), weights.sum()


def _of_rows(name: str, function: Callable[[Array, Array], Array], outputs: Any, batch: Mapping[str, Array]) -> Array:
    targets = _targets(name, outputs, batch)
    if outputs.size != targets.size:
        raise _unfit(name, "as many numbers as there are targets", outputs, targets)
    values = function(outputs.reshape(targets.shape), targets.astype(outputs.dtype))
    return values.reshape(values.shape[0], -1).mean(axis=1)


def _targets(name: str, outputs: Any, batch: Mapping[str, Array]) -> Array:
    """Returns the targets; raises a UserError if the outputs are not an array, or targets are missing."""
    own = 'or use your own loss, model.loss: "my_module:my_loss", (outputs, batch) -> one number for each row.'
    if not hasattr(outputs, "shape"):
        kind = _describe(outputs)
        raise UserError(f"{name} requires one array, but the module returns {kind}. Return one array, {own}")
    if "targets" not in batch:
        names = ", ".join(batch)
        raise UserError(
            f"{name} compares the outputs with batch['targets'], but the batch has {names}. Give data with that name, "
            f"{own}"
        )
    return batch["targets"]


def _unfit(name: str, wanted: str, outputs: Any, targets: Any, remedy: str = "") -> UserError:
    given = f"outputs {outputs.dtype} {tuple(outputs.shape)} and targets {targets.dtype} {tuple(targets.shape)}"
    remedy = remedy or "Change the last layer, the data, or model.loss"
    return UserError(f"{name} requires {wanted}, got {given}. {remedy}.")


def _describe(outputs: Any) -> str:
    """Returns a description of outputs that are not an array, with their shapes."""
    leaves = [f"{leaf.dtype} {tuple(leaf.shape)}" for leaf in jax.tree.leaves(outputs) if hasattr(leaf, "shape")]
    return f"a {type(outputs).__name__}" + (f" of {', '.join(leaves)}" if leaves else "")
