"""`train.steps=20` on the command line: values of single keys, laid over those of the file."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ...mesh.text import is_printable
from ...training.optimizing.groups import GroupConfig
from ..errors import Problem
from ..secret_variables import redact_override
from .reader import MOST_BYTES, read_yaml

FREE_KEYS = "layouts.rules"
"""The mapping whose keys are patterns: what follows its name is one key, dots and all."""
FREE_SECTIONS = "optimizer.groups"
"""The mapping from patterns to options: a word after the last dot is an option, the rest one key."""
OPTIONS_OF_GROUPS = tuple(each.name for each in fields(GroupConfig))

EMPTY = "an empty argument"
"""Stands for the key of an argument without any; a problem of the key "" would be one of the file."""


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> tuple[list[Problem], dict[str, str]]:
    """Sets the value of each override in the tree of plain values, in place.

    A key goes before the mapping that it stands in, whatever their order: `strategy={fsdp: 4}` sets the section, and
    `strategy.fsdp.floor_bytes=1` one option in it. Of two overrides for one key the last wins. A size given for a
    strategy sets its size and leaves its other options: `strategy.fsdp=2`.

    Args:
        tree: What the file holds.
        overrides: `key=value`, the value read as YAML.

    Returns:
        What is wrong with the overrides themselves, and for each key that one sets: the override as it was typed.
    """
    problems: list[Problem] = []
    given_by: dict[str, str] = {}
    readable: list[tuple[list[str], Any]] = []
    for text in overrides:
        key, equals, value_text = text.partition("=")
        if not equals or not all(split_key(key)) or not is_printable(key):
            key = text or EMPTY
            given_by[key] = _shown(text)
            problems.append(Problem(key, "it must be key=value, such as train.steps=20."))
            continue
        if len(value_text) > MOST_BYTES:
            given_by[key] = _shown(text)
            problems.append(Problem(key, f"a value of {len(value_text):,} characters is too long."))
            continue
        document = read_yaml(value_text)
        parts = _as_option(split_key(key), document.value)
        given_by[".".join(parts)] = _shown(text)
        problems += [Problem(".".join(parts), problem.message) for problem in document.problems]
        if not document.problems:
            readable.append((parts, document.value))
    for parts, value in sorted(readable, key=lambda override: len(override[0])):
        sizes_to_options(tree)
        problems += _set(tree, parts, value)
    return problems, given_by


def sizes_to_options(tree: dict[str, Any]) -> None:
    """Writes `strategy: {fsdp: 4}` as `strategy: {fsdp: {size: 4}}`, and `strategy: fsdp` with size -1, in place."""
    strategy = tree.get("strategy")
    if isinstance(strategy, str) and strategy.isidentifier():
        tree["strategy"] = {strategy: {"size": -1}}
    if isinstance(strategy, dict):
        for name, value in strategy.items():
            if not isinstance(value, dict):
                strategy[name] = {"size": value}


def _shown(text: str) -> str:
    """An override as it was typed, where that stands on one line."""
    if not text.strip():
        return f"{text!r}, {EMPTY}"
    text = redact_override(text)
    short = text if len(text) <= 200 else f"{text[:200]}..."
    return short if is_printable(short) else repr(short)


def split_key(key: str) -> list[str]:
    """Returns the parts of a dotted key; a pattern is one part, dots and all."""
    if key.startswith(f"{FREE_KEYS}."):
        return [*FREE_KEYS.split("."), key.removeprefix(f"{FREE_KEYS}.")]
    if key.startswith(f"{FREE_SECTIONS}."):
        pattern, _, option = key.removeprefix(f"{FREE_SECTIONS}.").rpartition(".")
        is_option = option in OPTIONS_OF_GROUPS and pattern
        return [*FREE_SECTIONS.split("."), *((pattern, option) if is_option else (key[len(FREE_SECTIONS) + 1 :],))]
    return key.strip().split(".")


def _as_option(parts: list[str], value: Any) -> list[str]:
    """Returns the path that is really meant: a size is the option `size` of its strategy."""
    is_size = len(parts) == 2 and parts[0] == "strategy" and not isinstance(value, dict)
    return [*parts, "size"] if is_size else parts


def _set(tree: dict[str, Any], parts: list[str], value: Any) -> list[Problem]:
    """Sets one value, making the mappings above it; a problem where something else stands there."""
    key = ".".join(parts)
    for depth, part in enumerate(parts[:-1], 1):
        if tree.get(part) is None:
            tree[part] = {}
        if not isinstance(tree[part], dict):
            above = ".".join(parts[:depth])
            return [Problem(key, f"{above} is {tree[part]!r} and has no keys below it.")]
        tree = tree[part]
    tree[parts[-1]] = value
    return []
