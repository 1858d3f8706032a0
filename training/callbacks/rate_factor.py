"""A factor on the learning rate that the host can change between two steps without compiling again.

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
from ...mesh.processes import local_copy
from ...parallel.step.state import TrainState


class RateFactor(NamedTuple):
    """The state of the transformation.

    Attributes:
        factor: A float32 scalar; with local steps, one for each group.
    """

    factor: Array


class PartFactors(NamedTuple):
    """The state of `in_parts`.

    Attributes:
        factors: Name of a part -> float32 scalar; with local steps, one for each group.
    """

    factors: dict[str, Array]


def adjustable(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns an optimizer that multiplies its updates by a factor in its state.

    Args:
        optimizer: Any optax transformation.
    """

    def init(params: Any) -> RateFactor:
        return RateFactor(jnp.ones((), jnp.float32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(lambda leaf: leaf * state.factor.astype(leaf.dtype), updates), state

    return optax.chain(optimizer, optax.GradientTransformation(init, update))


def in_parts(optimizer: optax.GradientTransformation, parts: Mapping[str, str]) -> optax.GradientTransformation:
    """Returns an optimizer that does not train some parts of the parameters until a callback requests it.

    Gradients of all parts are computed, and the optimizer averages them: a part that starts to train already has its
    averages. Updates of the other parts, including weight decay, are multiplied by 0.

    Args:
        optimizer: Any optax transformation.
        parts: Name of a part -> regular expression of the paths of its parameters.

    Raises:
        UserError: In `init`, if an expression matches no parameter.
    """

    def init(params: Any) -> PartFactors:
        match_paths(list(parts.values()), [path for path, _ in leaves_with_paths(params)], "in_parts")
        return PartFactors({name: jnp.zeros((), jnp.float32) for name in parts})

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def scaled(path: str, leaf: Array) -> Array:
            for name, pattern in parts.items():
                leaf = leaf * state.factors[name].astype(leaf.dtype) if matches(pattern, path) else leaf
            return leaf

        return map_with_path(scaled, updates), state

    return optax.chain(optimizer, optax.GradientTransformation(init, update))


def factor_of(state: TrainState) -> float | None:
    """Returns the factor in a state, or None if its optimizer is not adjustable."""
    for leaf in _factors(state.opt_state):
        return float(np.asarray(local_copy(leaf.factor)).flat[0])
    return None


def with_factor(state: TrainState, factor: float) -> TrainState:
    """Returns the state with another factor and the same layouts; processes do not wait for each other.

    Args:
        state: The state of an adjustable optimizer.
        factor: A positive, finite factor.
    """

    def changed(leaf: Any) -> Any:
        return RateFactor(_filled(leaf.factor, factor)) if isinstance(leaf, RateFactor) else leaf

    return state._replace(opt_state=jax.tree.map(changed, state.opt_state, is_leaf=_is_factor))


def part_factors_of(state: TrainState) -> dict[str, float]:
    """Returns name -> factor of the parts of an optimizer made by `in_parts`; empty for any other."""
    found = [leaf for leaf in jax.tree.leaves(state.opt_state, is_leaf=_is_factor) if isinstance(leaf, PartFactors)]
    arrays = {name: array for each in found for name, array in each.factors.items()}
    return {name: float(np.asarray(local_copy(array)).flat[0]) for name, array in arrays.items()}


def with_part_factors(state: TrainState, factors: Mapping[str, float]) -> TrainState:
    """Returns the state with other factors of some parts and the same layouts; processes do not wait.

    Args:
        state: The state of an optimizer made by `in_parts`.
        factors: Name of a part -> a non-negative, finite factor.
    """

    def changed(leaf: Any) -> Any:
        if not isinstance(leaf, PartFactors):
            return leaf
        return PartFactors(
            {name: _filled(old, factors[name]) if name in factors else old for name, old in leaf.factors.items()}
        )

    return state._replace(opt_state=jax.tree.map(changed, state.opt_state, is_leaf=_is_factor))


def _filled(old: Array, value: float) -> Array:
    """Returns an array of one value with the layout of another."""
    whole = np.full(old.shape, value, old.dtype)
    return jax.make_array_from_callback(old.shape, old.sharding, lambda index: whole[index])


def _factors(tree: Any) -> list[RateFactor]:
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_factor) if isinstance(leaf, RateFactor)]


def _is_factor(leaf: Any) -> bool:
    return isinstance(leaf, RateFactor | PartFactors)
