"""A factor on the learning rate that the host may change between two steps, without compiling again.

    optimizer = adjustable(optax.adamw(1e-3))       update = factor * (the update of adamw)

The factor is a float32 scalar in the optimizer's state, 1 at first: saved, restored and laid out with it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from ...mesh.processes import local_copy
from ...parallel.step.state import TrainState


class RateFactor(NamedTuple):
    """The state of the transformation.

    Attributes:
        factor: float32, scalar; with local steps one for each group.
    """

    factor: Array


def adjustable(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimizer whose updates are multiplied by a factor in its state.

    Args:
        optimizer: Any optax transformation.
    """

    def init(params: Any) -> RateFactor:
        return RateFactor(jnp.ones((), jnp.float32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(lambda leaf: leaf * state.factor.astype(leaf.dtype), updates), state

    return optax.chain(optimizer, optax.GradientTransformation(init, update))


def factor_of(state: TrainState) -> float | None:
    """The factor in a state; None where its optimizer is not adjustable."""
    for leaf in _factors(state.opt_state):
        return float(np.asarray(local_copy(leaf.factor)).flat[0])
    return None


def with_factor(state: TrainState, factor: float) -> TrainState:
    """The state with another factor, laid out as before; no process waits for another.

    Args:
        state: Of an adjustable optimizer.
        factor: Over 0, and finite.
    """

    def changed(leaf: Any) -> Any:
        if not isinstance(leaf, RateFactor):
            return leaf
        old, value = leaf.factor, np.full(leaf.factor.shape, factor, leaf.factor.dtype)
        return RateFactor(jax.make_array_from_callback(old.shape, old.sharding, lambda index: value[index]))

    return state._replace(opt_state=jax.tree.map(changed, state.opt_state, is_leaf=_is_factor))


def _factors(tree: Any) -> list[RateFactor]:
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_factor) if _is_factor(leaf)]


def _is_factor(leaf: Any) -> bool:
    return isinstance(leaf, RateFactor)
