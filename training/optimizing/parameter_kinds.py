"""Which parameters are matrices and which are vectors, where blocks are stacked on dim 0."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

from ...layouts.path_patterns import paths_met
from ...layouts.paths import in_blocks, leaves_with_paths, map_with_path


def is_stacked(abstract_params: Any) -> bool:
    """Whether the parameters look like a `BlockModel`'s: exactly the groups "embed", "blocks" and "head"."""
    return isinstance(abstract_params, Mapping) and set(abstract_params) == {"embed", "blocks", "head"}


def check_met(abstract_params: Any, patterns: Sequence[str], key: str) -> None:
    """Checks that every expression meets a parameter.

    Args:
        abstract_params: Shapes of the parameters.
        patterns: Regular expressions of whole paths.
        key: Their config key.

    Raises:
        UserError: An expression meets no parameter; names the nearest path.
    """
    paths_met(patterns, [path for path, _ in leaves_with_paths(abstract_params)], key)


def select(
    abstract_params: Any, stacked: bool, *, skip: Sequence[str] = (), layer_rank: Sequence[int] = range(2, 100)
) -> Any:
    """Picks parameters by the rank that they have in one layer: a stack of norms (N, D) counts as vectors, rank 1.

    Args:
        abstract_params: Shapes of the parameters.
        stacked: Whether "blocks" holds blocks stacked on dim 0.
        skip: Regular expressions; parameters whose whole path matches one are left out.
        layer_rank: Ranks to pick, of an array without its layer dim.

    Returns:
        A tree of bools, structured like the parameters.
    """

    def picked(path: str, leaf: Any) -> bool:
        rank = len(leaf.shape) - (stacked and in_blocks(path))
        return rank in layer_rank and not any(re.fullmatch(pattern, path) for pattern in skip)

    return map_with_path(picked, abstract_params)


def by_layer(transformation: optax.GradientTransformation, abstract_params: Any) -> optax.GradientTransformation:
    """Applies a transformation that looks at whole arrays to each block of a stack by itself.

    Args:
        transformation: Its state and its updates for one array may depend on all of the array.
        abstract_params: A `BlockModel`'s parameters: everything under "blocks" is stacked on dim 0.

    Returns:
        A transformation of the same parameters.
    """

    def init(params: Any) -> Any:
        return jax.vmap(transformation.init)(params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.vmap(transformation.update)(updates, state, params)

    labels = map_with_path(lambda path, _: "blocks" if in_blocks(path) else "rest", abstract_params)
    if "blocks" not in jax.tree.leaves(labels):  # a group of parameters outside of the blocks
        return transformation
    return optax.partition({"blocks": optax.GradientTransformation(init, update), "rest": transformation}, labels)
