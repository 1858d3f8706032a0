"""What a loss returns: the pair of sums that training needs, and what a model may give beside it.

    return total, weight                                                 enough
    return total, weight, {"accuracy": (hits, counted)}                  metrics: pairs of sums, as the loss itself
    return LossSums(total, weight, {"accuracy": (hits, counted)}, state)   and the next state, of a model that has one

Every pair is summed by itself over rows, microbatches and devices and divided once: a mean over the global batch is
exact whatever the mesh, whatever the weights. The sums of metrics travel with those of the loss, in one reduction.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ...layouts.paths import leaves_with_paths
from ...mesh.errors import UserError

MOST_LISTED = 12
Pair = tuple[Array, Array]
"""A weighted sum and the sum of its weights, two scalars."""

OWN_NAMES = (
    *("loss", "grad_norm", "weight", "step", "loss_scale", "learning_rate"),
    *("seconds", "tokens_per_second", "rows_per_second", "flops_per_second"),
)
"""What a run logs by itself: a metric has another name."""

EXPECTED = (
    "It has to return a pair of floating-point scalars, (sum of loss x weight, sum of weights) over the rows it is "
    'given: (losses * batch["weights"]).sum(), batch["weights"].sum(). The runtime divides once, by the weight of the '
    'whole global batch. Metrics may follow, a dict of such pairs, {"accuracy": (hits, n)}, and then the next state of '
    "a model that has one (spmdkit.LossSums names them)."
)


class LossSums(NamedTuple):
    """The result of a loss over the rows it was given.

    Attributes:
        total: sum of the weighted losses, a float scalar: what is differentiated.
        weight: sum of the weights, a scalar.
        metrics: name -> (sum, weight), scalars; a dict may hold dicts, whose names are joined by "/".
        state: the next state, structured as `Model.init_state` gives it; () of a model without one.
    """

    total: Any
    weight: Any
    metrics: Any = ()
    state: Any = ()


class NotSums(UserError):
    """A loss returned something else; `said` tells what, as the end of a sentence about the loss."""

    def __init__(self, said: str) -> None:
        super().__init__(f"The model's loss {said}")
        self.said = said


def as_sums(result: Any) -> LossSums:
    """What a loss returned, checked: scalars of at least float32, metrics by their whole names.

    Args:
        result: (sum, weight), (sum, weight, metrics), or all four of `LossSums`; arrays, tracers or their shapes.

    Raises:
        NotSums: It is something else, or a metric has the name of something that a run logs by itself.
    """
    if not isinstance(result, tuple) or not 2 <= len(result) <= 4 or not all(map(_is_scalar, result[:2])):
        raise NotSums(f"returns {_described(result)}. {EXPECTED}")
    total, weight, metrics, state = LossSums(*result)
    if not jnp.issubdtype(jnp.result_type(total), jnp.floating):
        raise NotSums(f"returns a sum of dtype {jnp.result_type(total)}, which has no gradient. {EXPECTED}")
    return LossSums(_wide(total), _wide(weight), dict(_flat(metrics, "")), state)


def state_problem(found: Any, state: Any) -> str | None:
    """What is wrong with the next state that a loss returned, as the end of a sentence about the loss; or None.

    Args:
        found: What it returned; arrays or their shapes.
        state: What it was given.
    """
    have, want = dict(leaves_with_paths(found)), dict(leaves_with_paths(state))
    rule = (
        "Every array of it comes back, in the shape it had, and nothing else: LossSums(total, weight, metrics, state)."
    )
    for path in dict.fromkeys((*want, *have)):
        if path not in have or path not in want:
            what = "without" if path not in have else "that also has"
            return f"returns a state {what} {path!r}. {rule}"
        if jnp.shape(have[path]) != jnp.shape(want[path]):
            shapes = f"{list(jnp.shape(have[path]))} and was {list(jnp.shape(want[path]))}"
            return f"returns a state in which {path!r} has the shape {shapes}. {rule}"
    return None


def _flat(metrics: Any, prefix: str) -> Iterator[tuple[str, Pair]]:
    """Every pair by its whole name."""
    if metrics is None or (isinstance(metrics, tuple) and not metrics):
        return
    if not isinstance(metrics, Mapping):
        raise NotSums(f"returns metrics that are {_described(metrics)}, no dict of pairs. {EXPECTED}")
    for key, value in metrics.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}/")
        elif name in OWN_NAMES:
            raise NotSums(f"returns a metric named {name!r}, and a run logs one of that name itself. Rename it.")
        elif isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_scalar, value)):
            yield name, (_wide(value[0]), _wide(value[1]))
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


def _wide(scalar: Any) -> Array:
    scalar = jnp.asarray(scalar)
    return scalar.astype(jnp.promote_types(scalar.dtype, jnp.float32))


def _described(value: Any) -> str:
    leaves = jax.tree.leaves(value)
    if value is None or not leaves:
        return repr(value)
    kinds = [
        f"{jnp.result_type(leaf)} {jnp.shape(leaf)}" if _is_array(leaf) else type(leaf).__name__ for leaf in leaves
    ]
    container = "" if isinstance(value, tuple) or value is leaves[0] else f"a {type(value).__name__} of "
    return f"{container}{len(leaves)} value{'s' if len(leaves) > 1 else ''}, {', '.join(kinds[:MOST_LISTED])}"


def _is_array(value: Any) -> bool:
    return isinstance(value, bool | int | float) or hasattr(value, "dtype")
