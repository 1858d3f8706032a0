"""Skips updates that are not finite: every state stays as it was.

    finite      = the loss and every element of every gradient is finite
    parameters  = updated if finite, otherwise unchanged
    skipped     = skipped + (not finite)

The optimizer decides, because it counts. The step asks it (`skipped`), and leaves everything else as it was too: the
errors of compression and the model's own state (`loss_scaling.accept`).

It selects by element instead of using a conditional: XLA fuses it with the update, and on CPUs a conditional would copy
every array that passes through it. On a mesh, XLA adds one reduction of a scalar.

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
        in_a_row: Consecutive skipped updates, an int32 scalar.
        skipped: All skipped updates, an int32 scalar.
        inner: The optimizer's own state.
    """

    in_a_row: Array
    skipped: Array
    inner: Any


def skip_not_finite(inner: optax.GradientTransformation, most: int) -> optax.GradientTransformationExtraArgs:
    """Skips updates with a loss or gradients that are not finite.

    Args:
        inner: The optimizer. If its update gets `value`, as in a step, this is the loss.
        most: Maximum number of consecutive skipped updates, at least 1. The next one is applied in any case, so that
            the parameters are no longer finite and the run ends as diverged.

    Returns:
        The same optimizer with a `Skipping` as state.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> Skipping:
        zero = jnp.zeros((), jnp.int32)
        return Skipping(zero, zero, inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> tuple[Any, Skipping]:
        each = [jnp.isfinite(leaf).all().reshape(1) for leaf in jax.tree.leaves(updates)]
        finite = jnp.concatenate([jnp.ones(1, bool), *each]).all()
        if "value" in more:
            finite &= jnp.isfinite(more["value"])
        in_a_row = jnp.where(finite, 0, state.in_a_row + 1)
        skipped = state.skipped + jnp.where(finite, 0, 1)
        goes_on = finite | (in_a_row > most)
        changed, new = inner.update(updates, state.inner, params, **more)
        kept = jax.tree.map(lambda after, before: jnp.where(goes_on, after, before), new, state.inner)
        # Adding -0.0 changes no number, also not -0.0 itself.
        changed = jax.tree.map(lambda leaf: jnp.where(goes_on, leaf, jnp.full_like(leaf, -0.0)), changed)
        return changed, Skipping(in_a_row, skipped, kept)

    return optax.GradientTransformationExtraArgs(init, update)


def skipped(opt_state: Any) -> Array | None:
    """Returns the number of skipped updates, an int32 scalar of the state, or None if the optimizer never skips.

    Args:
        opt_state: The optimizer's state, `TrainState.opt_state`.
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, Skipping))
    return next((node.skipped for node in nodes if isinstance(node, Skipping)), None)
