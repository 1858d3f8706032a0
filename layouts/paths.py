"""Paths of the leaves of a pytree, names joined by `/`, and regular expressions that select them."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import KeyPath, keystr

from ..mesh.errors import did_you_mean, raise_problems

MAX_NAMED = 3
"""Paths in one message."""
NUMBER = re.compile(r"(?<![^/])\d+(?![^/])")


def leaves_with_paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """Lists the leaves of a pytree with their paths.

    Args:
        tree: Any pytree: dicts, lists, tuples, NamedTuples, registered dataclasses.
        is_leaf: Returns True for nodes to treat as leaves.

    Returns:
        (path, leaf) pairs in the order of `jax.tree.leaves`; dict keys, list indices and field names joined by "/",
        for example "blocks/0/attention/query". A tree that is itself a leaf has the path "".
    """
    return [(_join(keys), leaf) for keys, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)]


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns leaves by path as nested dicts: {"targets/box": a} becomes {"targets": {"box": a}}.

    Args:
        leaves: Path -> leaf, such as the arrays of a batch by name.

    Returns:
        Dicts of dicts; former lists are dicts with the keys "0", "1", ...
    """
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        inner = tree
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = leaf
    return tree


def map_with_path(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Maps `function(path, leaf, *leaves)` over one or more trees.

    Args:
        function: Called with the path and the leaf of each tree.
        tree: The tree that determines the structure and the paths.
        *rest: Trees with a structure that begins with that of `tree`.

    Returns:
        A tree of the results, structured like `tree`.
    """
    return jax.tree_util.tree_map_with_path(lambda keys, *leaves: function(_join(keys), *leaves), tree, *rest)


def flatten_mapping(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Returns dotted key -> value of nested mappings, such as a config; an empty mapping is a value.

    Args:
        values: Mappings, lists and scalars; only mappings are flattened.
        prefix: The beginning of every key, such as "model.".
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            flat |= flatten_mapping(value, f"{key}.")
        else:
            flat[key] = value
    return flat


def differing_leaves(first: Any, second: Any, describe: Callable[[Any], str]) -> Iterator[tuple[str, str, str]]:
    """Yields the paths at which two trees differ: (path, description in the first tree, description in the second).

    Args:
        first: Any pytree.
        second: Another.
        describe: Describes a leaf; leaves with equal descriptions do not differ. A leaf of one tree alone is "missing"
            in the other.
    """
    texts_in_first = _describe_leaves(first, describe)
    texts_in_second = _describe_leaves(second, describe)
    for path in {**texts_in_second, **texts_in_first}:
        in_first = texts_in_first.get(path, "missing")
        in_second = texts_in_second.get(path, "missing")
        if in_first != in_second:
            yield path, in_first, in_second


def _describe_leaves(tree: Any, describe: Callable[[Any], str]) -> dict[str, str]:
    return {path: describe(leaf) for path, leaf in leaves_with_paths(tree)}


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


def join(tree: Any, rest: Any) -> Any:
    """Joins the two trees of `split_at_paths`."""

    def first_present(leaf: Any, alternative: Any) -> Any:
        return alternative if leaf is None else leaf

    return jax.tree.map(first_present, tree, rest, is_leaf=lambda leaf: leaf is None)


def numberless(path: str) -> str:
    """Replaces the numbers of a path, so that an array of every layer has one name: "blocks/*/query"."""
    return NUMBER.sub("*", path)


def joined_path(paths: Sequence[str]) -> str:
    """Joins paths that differ only in their numbers: "blocks/{0..11}/query"."""
    split_paths = [path.split("/") for path in paths]
    parts = []
    for names in zip(*split_paths, strict=True):
        is_common = len(set(names)) == 1
        parts.append(names[0] if is_common else _numbers(names))
    return "/".join(parts)


def in_blocks(path: str) -> bool:
    """Returns True for a parameter of the stacked blocks of a model."""
    return path.split("/")[0] == "blocks"


def pattern_problem(pattern: object) -> str | None:
    """Returns the problem of a regular expression for paths, or None."""
    if not isinstance(pattern, str):
        return f"a pattern of parameter paths must be a string, got {pattern!r} ({type(pattern).__name__})."
    try:
        re.compile(pattern)
    except re.error as error:
        return f"{pattern!r} is not a valid regular expression: {error}."
    return None


def matches(pattern: str, path: str) -> bool:
    """Returns True if a pattern equals a path or matches all of it."""
    return pattern == path or re.fullmatch(pattern, path) is not None


def match_paths(patterns: Sequence[str], paths: Sequence[str], key: str) -> dict[str, list[str]]:
    """Finds the paths that each pattern matches.

    Args:
        patterns: Regular expressions.
        paths: The paths of all parameters.
        key: The config key of the expressions, for messages.

    Returns:
        Pattern -> the paths that it matches, at least one, in order.

    Raises:
        UserError: Patterns match no path; the message has the nearest path of each.
    """
    matched: dict[str, list[str]] = {}
    wrong: list[str] = []
    listed = f" The parameters are {some(paths) or 'none'}."
    for pattern in patterns:
        matched[pattern] = [path for path in paths if matches(pattern, path)]
        if not matched[pattern]:
            hint = did_you_mean(pattern, paths, cutoff=0.4) or listed
            wrong.append(f"{key}: {pattern!r} matches no parameter.{hint}")
    raise_problems(wrong)
    return matched


def some(names: Iterable[str], most: int = MAX_NAMED) -> str:
    """Returns the first names of a list, at most `most`, and the number of the others."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def _numbers(names: Sequence[str]) -> str:
    numbers = sorted({int(name) for name in names})
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    return f"{{{','.join(map(str, numbers))}}}"


def _join(keys: KeyPath) -> str:
    return keystr(keys, simple=True, separator="/")
