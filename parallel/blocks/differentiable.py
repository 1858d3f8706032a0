"""Separates the leaves of activations that have a gradient from the others."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..model import Activations


def split_differentiable(x: Activations) -> tuple[list[Any], list[Any]]:
    """Separates the leaves of x, arrays or shapes, into floating-point ones and others (positions, indices)."""
    leaves = jax.tree.leaves(x)
    return list(filter(_has_gradient, leaves)), [leaf for leaf in leaves if not _has_gradient(leaf)]


def join_differentiable(like: Activations, differentiable: Iterable[Array], others: Iterable[Array]) -> Activations:
    """Reverses `split_differentiable`, for a tree like `like`."""
    leaves, treedef = jax.tree.flatten(like)
    differentiable, others = iter(differentiable), iter(others)
    return jax.tree.unflatten(treedef, [next(differentiable if _has_gradient(leaf) else others) for leaf in leaves])


def _has_gradient(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
