"""The state of a model in a step: what a loss makes of it on each device becomes one, the same on all.

    floating-point arrays    mean over the devices that sum gradients
    others                   the largest over them

What does not vary over the mesh, as the running statistics of a batch norm over all `batch_axes()`, is kept as it
is: nothing is moved.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...mesh.compat import varying_axes
from ...mesh.keys import key_of, make_key
from ..model import has_state
from ..precision import Precision, cast_floats


def abstract_model_state(model: Any, precision: Precision) -> Any:
    """Shapes and dtypes of a model's state as a run stores it; () where it has none.

    Args:
        model: Any model.
        precision: Floating-point arrays are stored in the parameters' dtype.
    """
    return jax.eval_shape(lambda key: _first(model, precision, key), make_key(0)) if has_state(model) else ()


def first_model_state(model: Any, precision: Precision, key_data: Array) -> Any:
    """The state of a model that has one, before the first step. Traced; `key_data` is raw data of the run's key."""
    return _first(model, precision, key_of(key_data))


def _first(model: Any, precision: Precision, key: Array) -> Any:
    state = cast_floats(model.init_state(key), precision.params)
    return jax.tree.map(lambda leaf: lax.convert_element_type(leaf, leaf.dtype), state)


def settle(found: Any, state: Any, axes: tuple[str, ...], *, typed: bool) -> Any:
    """The next state, the same on every device. Runs inside `shard_map`.

    Args:
        found: What this device's loss made of the state.
        state: The state before, whose dtypes are kept.
        axes: Mesh axes over which devices hold shares of the loss.
        typed: Whether JAX knows what varies over the mesh; else everything is taken to.
    """

    def settled(leaf: Any, before: Array) -> Array:
        leaf = jnp.asarray(leaf)
        over = tuple(axis for axis in axes if not typed or axis in varying_axes(leaf))
        if over and jnp.issubdtype(leaf.dtype, jnp.inexact):
            leaf = lax.pmean(leaf, over)
        elif over:
            leaf = lax.pmax(leaf.astype(jnp.promote_types(leaf.dtype, jnp.uint8)), over)
        return lax.convert_element_type(leaf, before.dtype)  # of no weak type: the next step takes the same program

    return jax.tree.map(settled, found, state)
