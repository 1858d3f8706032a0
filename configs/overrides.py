"""`train.steps=20` on the command line: values of single keys, laid over those of the file."""

from collections.abc import Sequence
from typing import Any

from .errors import Problem
from .reader import read_yaml

FREE_KEYS = "layouts.rules"
"""The mapping whose keys are patterns: what follows its name is one key, dots and all."""


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> tuple[list[Problem], dict[str, str]]:
    """Sets the value of each override in the tree of plain values, in place; the last of two for one key wins.

    A size given for a strategy sets its size and leaves its other options: `strategy.fsdp=2`.

    Args:
        tree: What the file holds, every strategy as a mapping of options.
        overrides: `key=value`, the value read as YAML.

    Returns:
        What is wrong with the overrides themselves, and for each key that one sets: the words that say so.
    """
    problems: list[Problem] = []
    given_by: dict[str, str] = {}
    for text in overrides:
        key, equals, value_text = text.partition("=")
        if not equals or not all(_split(key)):
            problems.append(Problem("", f"override {text!r} must be key=value, such as train.steps=20."))
            continue
        document = read_yaml(value_text)
        problems += [Problem("", f"override {text!r}: {problem.message}") for problem in document.problems]
        if not document.problems:
            given_by[key] = f"override {text}"
            problems += _set(tree, _as_option(_split(key), document.value), document.value, text)
    return problems, given_by


def _split(key: str) -> list[str]:
    if key.startswith(f"{FREE_KEYS}."):
        return [*FREE_KEYS.split("."), key.removeprefix(f"{FREE_KEYS}.")]
    return key.strip().split(".")


def _as_option(parts: list[str], value: Any) -> list[str]:
    """Returns the path that is really meant: a size is the option `size` of its strategy."""
    is_size = len(parts) == 2 and parts[0] == "strategy" and not isinstance(value, dict)
    return [*parts, "size"] if is_size else parts


def _set(tree: dict[str, Any], parts: list[str], value: Any, text: str) -> list[Problem]:
    """Sets one value, making the mappings above it; a problem where something else stands there."""
    for depth, part in enumerate(parts[:-1], 1):
        if tree.get(part) is None:
            tree[part] = {}
        if not isinstance(tree[part], dict):
            above = ".".join(parts[:depth])
            return [Problem("", f"override {text!r}: {above} is {tree[part]!r} and has no keys below it.")]
        tree = tree[part]
    tree[parts[-1]] = value
    return []
