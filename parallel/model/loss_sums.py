"""The result of a loss: the pair of sums that training needs, and optional metrics and state.

    return total, weight                                                 sufficient
    return total, weight, {"accuracy": (hits, counted)}                  with metrics: pairs of sums, like the loss
    return LossSums(total, weight, {"accuracy": (hits, counted)}, state)   with the next state, if a model has one

Every pair is summed separately over rows, microbatches and devices, and divided once: a mean over the global batch is
exact for any mesh and any weights. The sums of metrics are reduced together with those of the loss.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ...layouts.paths import differing_leaves
from ...mesh.errors import UserError

MAX_LISTED = 12
Pair = tuple[Array, Array]
"""A weighted sum and the sum of its weights, two scalars."""

OWN_NAMES = (
    *("loss", "grad_norm", "weight", "step", "loss_scale", "learning_rate"),
    *("seconds", "tokens_per_second", "rows_per_second", "flops_per_second"),
)
"""Names of a run's own metrics, which a model's metrics must not have."""

EXPECTED = (
    "It must return a pair of floating-point scalars, (sum of loss x weight, sum of weights) over the rows it is "
    'given: (losses * batch["weights"]).sum(), batch["weights"].sum(). The runtime divides once, by the weight of the '
    'whole global batch. Metrics may follow, a dict of such pairs, {"accuracy": (hits, n)}, and then the next state of '
    "a model that has one (spmdkit.LossSums names them)."
)


class LossSums(NamedTuple):
    """The result of a loss over the rows it was given.

    Attributes:
        total: The sum of the weighted losses, a floating-point scalar, which is differentiated.
        weight: The sum of the weights, a scalar.
        metrics: Name -> (sum, weight), scalars; names in nested dicts are joined by "/".
        state: The next state, in the structure of `Model.init_state`; () for a model without one.
    """

    total: Any
    weight: Any
    metrics: Any = ()
    state: Any = ()


class NotSums(UserError):
    """The result of a loss is invalid; `reason` completes a sentence about the loss."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"The model's loss {reason}")
        self.reason = reason


def as_sums(result: Any, reduce: str = "float32") -> LossSums:
    """Checks the result of a loss, and returns scalars of at least float32, and metrics by their full names.

    Args:
        result: (sum, weight), (sum, weight, metrics), or all four of `LossSums`; arrays, tracers or their shapes.
        reduce: The dtype in which gradients are reduced; the scalars, which are reduced with them, get it if it is
            wider.

    Raises:
        NotSums: The result is invalid, or a metric has a name that a run logs itself.
    """
    if not isinstance(result, tuple) or not 2 <= len(result) <= 4 or not all(map(_is_scalar, result[:2])):
        raise NotSums(f"returns {_described(result)}. {EXPECTED}")
    total, weight, metrics, state = LossSums(*result)
    if not jnp.issubdtype(jnp.result_type(total), jnp.floating):
        raise NotSums(f"returns a sum of dtype {jnp.result_type(total)}, which is not differentiable. {EXPECTED}")
    pairs = {name: (_wide(top, reduce), _wide(bottom, reduce)) for name, (top, bottom) in _flat(metrics, "")}
    return LossSums(_wide(total, reduce), _wide(weight, reduce), pairs, state)


def state_problem(found: Any, state: Any) -> str | None:
    """Checks the next state that a loss returned; returns the end of a sentence about the loss, or None if it is valid.

    Args:
        found: The returned state; arrays or their shapes.
        state: The given state.
    """
    for path, given, expected in differing_leaves(found, state, lambda leaf: f"of shape {jnp.shape(leaf)}"):
        return (
            f"returns a state in which {path!r} is {given}, expected {expected}. Return every array of the state in "
            "the same shape, and nothing else: LossSums(total, weight, metrics, state)."
        )
    return None


def _flat(metrics: Any, prefix: str) -> Iterator[tuple[str, Pair]]:
    """Yields every pair by its full name."""
    if metrics is None or (isinstance(metrics, tuple) and not metrics):
        return
    if not isinstance(metrics, Mapping):
        raise NotSums(f"returns metrics that are {_described(metrics)}, not a dict of pairs. {EXPECTED}")
    for key, value in metrics.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}/")
        elif name in OWN_NAMES:
            raise NotSums(f"returns a metric named {name!r}, which a run logs itself. Rename the metric.")
        elif isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_scalar, value)):
            yield name, (value[0], value[1])
        else:
            raise NotSums(
                f"returns the metric {name!r} as {_described(value)}. A metric is a pair of scalars, (weighted sum, "
                "sum of the weights): for a mean over n rows, (mean * n, n)."
            )


def _is_scalar(value: Any) -> bool:
    if isinstance(value, bool | int | float):
        return True
    return getattr(value, "shape", None) == () and (
        jnp.issubdtype(value.dtype, jnp.number) and not jnp.issubdtype(value.dtype, jnp.complexfloating)
    )


def _wide(scalar: Any, dtype: str) -> Array:
    scalar = jnp.asarray(scalar)
    return scalar.astype(jnp.promote_types(jnp.promote_types(scalar.dtype, jnp.float32), dtype))


def _described(value: Any) -> str:
    leaves = jax.tree.leaves(value)
    if not leaves:
        return repr(value)
    kinds = [f"{leaf.dtype} {leaf.shape}" if hasattr(leaf, "dtype") else type(leaf).__name__ for leaf in leaves]
    container = "" if isinstance(value, tuple) or value is leaves[0] else f"a {type(value).__name__} of "
    return f"{container}{len(leaves)} value{'s' if len(leaves) > 1 else ''}, {', '.join(kinds[:MAX_LISTED])}"
