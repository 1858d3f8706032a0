"""Factors on updates that the host can change between two steps without compiling again.

    optimizer = adjustable(optax.adamw(1e-3))                               update = factor * (the update of adamw)
    optimizer = in_parts(optax.adamw(1e-3), {"backbone": "Conv_.*"})        the same for some parameters, from 0 on

A factor is a float32 scalar in the optimizer's state and is saved, restored and laid out with it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from ...layouts.paths import leaves_with_paths, map_with_path, match_paths, matches
from ...mesh.errors import UserError
from ...mesh.processes import local_copy
from ...parallel.step.state import TrainState

LEARNING_RATE = "learning_rate"
"""Name of the factor on all updates."""


class RateFactors(NamedTuple):
    """The state of the transformation.

    Attributes:
        factors: Name -> float32 scalar; with local steps, one for each group.
    """

    factors: dict[str, Array]


def adjustable(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns an optimizer that multiplies its updates by a factor in its state, 1 at first.

    Args:
        optimizer: Any optax transformation.
    """
    return _with_factors(optimizer, {LEARNING_RATE: ".*"}, 1.0)


def in_parts(optimizer: optax.GradientTransformation, parts: Mapping[str, str]) -> optax.GradientTransformation:
    """Returns an optimizer that does not train some parts of the parameters until a callback requests it.

    Gradients of all parts are computed, and the optimizer averages them: a part that starts to train already has its
    averages. Updates of the other parts, including weight decay, are multiplied by 0.

    Args:
        optimizer: Any optax transformation.
        parts: Name of a part -> regular expression of the paths of its parameters.

    Raises:
        UserError: A part has the name "learning_rate"; or, in `init`, an expression matches no parameter.
    """
    if LEARNING_RATE in parts:
        raise UserError(f"in_parts: {LEARNING_RATE!r} is the name of the factor on all updates. Choose another name.")
    return _with_factors(optimizer, parts, 0.0)


def factors_of(state: TrainState) -> dict[str, float]:
    """Returns the factors in a state by name: LEARNING_RATE and the parts, as far as its optimizer has them."""
    nodes = [node for node in jax.tree.leaves(state.opt_state, is_leaf=_has_factors) if _has_factors(node)]
    arrays = {name: array for node in nodes for name, array in node.factors.items()}
    return {name: float(np.asarray(local_copy(array)).flat[0]) for name, array in arrays.items()}


def with_factors(state: TrainState, factors: Mapping[str, float]) -> TrainState:
    """Returns the state with other factors and the same layouts; processes do not wait for each other.

    Args:
        state: The state of an optimizer with factors.
        factors: Name -> a non-negative, finite factor; the others stay.
    """

    def changed(node: Any) -> Any:
        if not _has_factors(node):
            return node
        new = {name: _filled(array, factors[name]) for name, array in node.factors.items() if name in factors}
        return RateFactors(node.factors | new)

    return state._replace(opt_state=jax.tree.map(changed, state.opt_state, is_leaf=_has_factors))


def _with_factors(
    optimizer: optax.GradientTransformation, parts: Mapping[str, str], first: float
) -> optax.GradientTransformation:
    def init(params: Any) -> RateFactors:
        match_paths(list(parts.values()), [path for path, _ in leaves_with_paths(params)], "in_parts")
        return RateFactors({name: jnp.full((), first, jnp.float32) for name in parts})

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def scaled(path: str, leaf: Array) -> Array:
            for name, pattern in parts.items():
                leaf = leaf * state.factors[name].astype(leaf.dtype) if matches(pattern, path) else leaf
            return leaf

        return map_with_path(scaled, updates), state

    return optax.chain(optimizer, optax.GradientTransformation(init, update))


def _filled(old: Array, value: float) -> Array:
    """Returns an array of one value with the layout of another."""
    whole = np.full(old.shape, value, old.dtype)
    return jax.make_array_from_callback(old.shape, old.sharding, lambda index: whole[index])


def _has_factors(node: Any) -> bool:
    return isinstance(node, RateFactors)
