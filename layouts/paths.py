"""Paths of the leaves of a pytree: names joined by `/`, as rules and checkpoints write them."""

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.tree_util import KeyPath, keystr

NUMBER = re.compile(r"(?<![^/])\d+(?![^/])")


def leaves_with_paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """Lists the leaves of a pytree with their paths.

    Args:
        tree: Any pytree: dicts, lists, tuples, NamedTuples, registered dataclasses.
        is_leaf: Tells nodes that are to be taken as leaves.

    Returns:
        (path, leaf) pairs in the order of `jax.tree.leaves`; dict keys, list indices and field names joined by "/",
        for example "blocks/0/attention/query". A tree that is itself a leaf has the path "".
    """
    return [(_join(keys), leaf) for keys, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)]


def map_with_path(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Maps `function(path, leaf, *leaves)` over one or more trees.

    Args:
        function: Called with the path and the leaf of each tree.
        tree: The tree whose structure and paths are used.
        *rest: Trees whose structure begins with that of `tree`.

    Returns:
        A tree of the results, structured like `tree`.
    """
    return jax.tree_util.tree_map_with_path(lambda keys, *leaves: function(_join(keys), *leaves), tree, *rest)


def split_at_paths(tree: Any, paths: Collection[str]) -> tuple[Any, Any]:
    """Splits a pytree in two: the leaves at some paths, and the others.

    Args:
        tree: Any pytree.
        paths: Paths of leaves.

    Returns:
        Two trees like the given one, with None in place of the leaves that are in the other; `join` is the reverse.
    """
    chosen = map_with_path(lambda path, leaf: leaf if path in paths else None, tree)
    others = map_with_path(lambda path, leaf: None if path in paths else leaf, tree)
    return chosen, others


def join(tree: Any, other: Any) -> Any:
    """Joins two trees that `split_at_paths` made."""
    return jax.tree.map(lambda one, two: two if one is None else one, tree, other, is_leaf=lambda leaf: leaf is None)


def numberless(path: str) -> str:
    """Replaces the numbers of a path, so that the same array of every layer has one name.

    Args:
        path: For example "blocks/3/query".

    Returns:
        For example "blocks/*/query".
    """
    return NUMBER.sub("*", path)


def joined_path(paths: Sequence[str]) -> str:
    """Writes paths that differ only in their numbers as one.

    Args:
        paths: At least one; all with the same `numberless` form.

    Returns:
        For example "blocks/{0..11}/query".
    """
    parts = zip(*(path.split("/") for path in paths), strict=True)
    return "/".join(part[0] if len(set(part)) == 1 else _numbers(part) for part in parts)


def in_blocks(path: str) -> bool:
    """Whether a parameter belongs to the stacked blocks of a model."""
    return path.split("/")[0] == "blocks"


def _numbers(names: Sequence[str]) -> str:
    numbers = sorted({int(name) for name in names})
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    return f"{{{','.join(map(str, numbers))}}}"


def _join(keys: KeyPath) -> str:
    return keystr(keys, simple=True, separator="/")
