"""Which parameters are matrices and which are vectors, where blocks are stacked on dim 0."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

from ..layouts.paths import in_blocks, leaves_with_paths, map_with_path
from ..mesh.errors import UserError
from ..mesh.near_miss import did_you_mean


def is_stacked(abstract_params: Any) -> bool:
    """Whether the parameters look like a `BlockModel`'s: exactly the groups "embed", "blocks" and "head"."""
    return isinstance(abstract_params, Mapping) and set(abstract_params) == {"embed", "blocks", "head"}


def select(
    abstract_params: Any,
    stacked: bool,
    *,
    skip: Sequence[str],
    key: str | None,
    layer_rank: Sequence[int] = range(2, 100),
) -> Any:
    """Picks parameters by the rank that they have in one layer: a stack of norms (N, D) counts as vectors, rank 1.

    Args:
        abstract_params: Shapes of the parameters.
        stacked: Whether "blocks" holds blocks stacked on dim 0.
        skip: Regular expressions; parameters whose whole path matches one are left out.
        key: The config key of `skip`, where each expression has to meet a parameter; None where it need not.
        layer_rank: Ranks to pick, of an array without its layer dim.

    Returns:
        A tree of bools, structured like the parameters.

    Raises:
        UserError: An expression meets no parameter; names the nearest path.
    """
    paths = [path for path, _ in leaves_with_paths(abstract_params)]
    unmet = [pattern for pattern in skip if not any(re.fullmatch(pattern, path) for path in paths)] if key else []
    if unmet:
        lines = [
            f"{key}: {pattern!r} matches no parameter.{did_you_mean(pattern, paths, otherwise='There are')}"
            for pattern in unmet
        ]
        raise UserError("\n".join(lines))

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
    return optax.partition({"blocks": optax.GradientTransformation(init, update), "rest": transformation}, labels)
