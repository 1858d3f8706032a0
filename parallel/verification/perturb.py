"""Perturbs a model so that mistakes show in the comparison with one device."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..model import BlockModel, Model

JITTER = 0.1
"""The relative size of the perturbation."""


def prepared(model: Model | BlockModel, dtype: str) -> Model | BlockModel:
    """Returns the model with perturbed initial parameters.

    A table of zeros or ones hides mistakes, as its gradient may be zero and its parts are the same in any order. So
    every element of the initial parameters is scaled by a random factor near 1, and zeros become small numbers over 0.
    Loss and weight are given in `dtype`, so that they travel with gradients of that dtype.

    Args:
        model: Any model.
        dtype: The dtype in which gradients are summed.
    """

    def init(key: Array) -> Any:
        leaves, treedef = jax.tree.flatten(model.init(key))
        return jax.tree.unflatten(treedef, [_moved(leaf, number) for number, leaf in enumerate(leaves)])

    if isinstance(model, Model):
        return replace(model, init=init, loss=_in_dtype(model.loss, dtype))
    changes: dict[str, Any] = {"init": init, "head": _in_dtype(model.head, dtype)}
    parallelize = model.parallelize
    if parallelize is not None:
        changes["parallelize"] = lambda parallel: prepared(parallelize(parallel), dtype)
    return replace(model, **changes)


def _in_dtype(function: Callable[..., Any], dtype: str) -> Callable[..., Any]:
    """Returns the function with sums of at least this dtype; the runtime rejects anything but a pair of scalars."""

    def wide(scalar: Any) -> Array:
        return jnp.asarray(scalar, jnp.promote_types(jnp.result_type(scalar), dtype))

    def call(*arguments: Any) -> Any:
        result = function(*arguments)
        if not isinstance(result, tuple) or len(result) < 4:
            return jax.tree.map(wide, result)
        return (*jax.tree.map(wide, tuple(result[:3])), *result[3:])  # the state stays as it is

    return call


def _moved(leaf: Any, number: int) -> Any:
    leaf = jnp.asarray(leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    index = jnp.arange(leaf.size, dtype=jnp.uint32).reshape(leaf.shape) + jnp.uint32(number * 7919)
    hashed = index * jnp.uint32(2654435761) >> 8  # integers, so that every program gives the same
    noise = hashed.astype(jnp.float32) * 2.0**-23 - 1.0
    moved = jnp.where(leaf == 0, JITTER * (1.5 + noise), leaf * (1.0 + JITTER * noise))
    return moved.astype(leaf.dtype)
