"""Low-rank matrices beside the parameters of a group: drawn, and merged into what they adapt (see `lora.py`).

Letters: r the rank, I and O the last two dims of a matrix. A is (..., I, r), B is (..., r, O), both in float32.
"""

from collections.abc import Collection
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ...layouts.paths import leaves_with_paths, map_with_path
from ...parallel.model import Params
from .initializers import truncated_normal

NAME = "lora"
"""Of the adapters within a group of parameters."""
BASE = "base"
"""Of a group that is no dict, beside its adapters."""


class Group(NamedTuple):
    """Parameters that lie in one tree: a group of a `BlockModel`, or all of a `Model`'s.

    Attributes:
        name: of the group, "" for all parameters.
        is_dict: whether adapters stand among the parameters; else these are under `BASE`.
        stacked: whether dim 0 counts blocks.
        adapted: path within the group -> shape and dtype of what is adapted.
    """

    name: str
    is_dict: bool
    stacked: bool
    adapted: dict[str, jax.ShapeDtypeStruct]

    def full(self, path: str) -> str:
        """The path of one of its parameters in the base model."""
        return f"{self.name}/{path}" if self.name else path


def group_of(name: str, tree: Params, adapted: Collection[str], *, stacked: bool) -> Group:
    """Says which parameters of a tree are adapted.

    Args:
        name: Of the group, "" for all parameters.
        tree: Its parameters, or their shapes.
        adapted: Paths in the base model of all that are adapted, those of other groups among them.
        stacked: Whether dim 0 counts blocks.
    """
    group = Group(name, type(tree) is dict, stacked, {})
    found = {path: leaf for path, leaf in leaves_with_paths(tree) if group.full(path) in adapted}
    return group._replace(adapted=found)


def with_adapters(group: Group, tree: Params, rank: int, key: Array) -> Params:
    """The parameters of a group and, beside them, A and B of each that is adapted."""
    if not group.adapted:
        return tree
    adapters: dict[str, Any] = {}
    for path, leaf in group.adapted.items():
        *folders, last = path.split("/")
        inner = adapters
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[last] = {
            "a": _draw(group, path, leaf, rank, key),
            "b": jnp.zeros((*leaf.shape[:-2], rank, leaf.shape[-1]), jnp.float32),
        }
    return {**tree, NAME: adapters} if group.is_dict else {BASE: tree, NAME: adapters}


def _draw(group: Group, path: str, leaf: jax.ShapeDtypeStruct, rank: int, key: Array) -> Array:
    """A, of deviation I ** -0.5; that of block n does not depend on how many blocks there are."""
    shape, name = (*leaf.shape[:-1], rank), group.full(f"{NAME}/{path}/a")
    std = leaf.shape[-2] ** -0.5
    if not group.stacked:
        return truncated_normal(key, name, shape, std)
    keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(shape[0]))
    return jax.vmap(lambda each: truncated_normal(each, name, shape[1:], std))(keys)


def merged(group: Group, tree: Params, *, scale: float) -> Params:
    """The parameters of a group as the base has them; of one block, where blocks are stacked, or of all."""
    if not group.adapted:
        return tree
    adapters = dict(leaves_with_paths(tree[NAME]))
    own = {name: value for name, value in tree.items() if name != NAME} if group.is_dict else tree[BASE]

    def merge(path: str, weight: Any) -> Any:
        if path not in group.adapted:
            return weight
        a, b = (jnp.asarray(adapters[f"{path}/{name}"]) for name in ("a", "b"))
        wide = jnp.promote_types(weight.dtype, jnp.float32)
        product = jnp.matmul(a, b.astype(a.dtype), preferred_element_type=wide)
        return (weight.astype(wide) + scale * product.astype(wide)).astype(weight.dtype)

    return map_with_path(merge, own)
