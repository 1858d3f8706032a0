"""Updates that are left out because a gradient is not finite: parameters and state stay as they were.

    finite      = every element of every gradient is finite
    parameters  = updated where finite, else as they were
    skipped     = skipped + (not finite)

A choice by element, not a conditional: XLA joins it to the update, and on CPUs a conditional would copy every array
that passes it. On a mesh the question whether all is finite is one more reduction of a scalar, which XLA adds.

Source: optax.apply_if_finite, the same idea.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array


class Skipping(NamedTuple):
    """The state of an optimizer that skips.

    Attributes:
        in_a_row: int32 scalar, updates left out since the last one that was not.
        total: int32 scalar, updates left out since the run began.
        inner: the optimizer's own state.
    """

    in_a_row: Array
    total: Array
    inner: Any


def skip_not_finite(inner: optax.GradientTransformation, most: int) -> optax.GradientTransformationExtraArgs:
    """Leaves out updates whose gradients are not finite.

    Args:
        inner: The optimizer.
        most: Updates in a row that may be left out, at least 1. The next one is made whatever it holds, so that the
            parameters are no longer finite and the run ends as diverged.

    Returns:
        The same optimizer, its state in a `Skipping`.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> Skipping:
        zero = jnp.zeros((), jnp.int32)
        return Skipping(zero, zero, inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> tuple[Any, Skipping]:
        each = [jnp.isfinite(leaf).all().reshape(1) for leaf in jax.tree.leaves(updates)]
        finite = jnp.concatenate([jnp.ones(1, bool), *each]).all()
        in_a_row = jnp.where(finite, 0, state.in_a_row + 1)
        total = state.total + jnp.where(finite, 0, 1)
        goes_on = finite | (in_a_row > most)
        changed, new = inner.update(updates, state.inner, params, **more)
        kept = jax.tree.map(lambda after, before: jnp.where(goes_on, after, before), new, state.inner)
        changed = jax.tree.map(lambda leaf: jnp.where(goes_on, leaf, jnp.zeros_like(leaf)), changed)
        return changed, Skipping(in_a_row, total, kept)

    return optax.GradientTransformationExtraArgs(init, update)


def skipped(opt_state: Any) -> Array | None:
    """How many updates a run has left out: an int32 scalar of the state, or None where the optimizer skips none.

    Args:
        opt_state: The optimizer's state, `TrainState.opt_state`.
    """
    found = [leaf for leaf in jax.tree.leaves(opt_state, is_leaf=_is_skipping) if _is_skipping(leaf)]
    return found[0].total if found else None


def _is_skipping(node: Any) -> bool:
    return isinstance(node, Skipping)
