"""The leaves of activations that have a gradient, and those that only travel with them."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..model import Activations


def split_floats(x: Activations) -> tuple[list[Array], list[Array]]:
    """The leaves of x that have a gradient, and the others (positions, indices of examples)."""
    leaves = jax.tree.leaves(x)
    return [leaf for leaf in leaves if _is_float(leaf)], [leaf for leaf in leaves if not _is_float(leaf)]


def join_floats(like: Activations, floats: Iterable[Array], others: Iterable[Array]) -> Activations:
    """The reverse of `split_floats`, for a tree like `like`."""
    leaves, treedef = jax.tree.flatten(like)
    floats, others = iter(floats), iter(others)
    return jax.tree.unflatten(treedef, [next(floats if _is_float(leaf) else others) for leaf in leaves])


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
