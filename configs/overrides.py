"""Overrides on the command line, such as `train.steps=20`, applied on top of the values of the file."""

from collections.abc import Sequence
from typing import Any

from ..mesh.errors import is_printable
from .config_errors import Problem, split_key
from .secret_variables import redact_override
from .yaml_reader import read_yaml

EMPTY = "an empty argument"
MAX_SHOWN = 200
"""Characters of an argument in a message."""


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> tuple[list[Problem], dict[str, str]]:
    """Sets the value of each override in the tree of plain values, in place.

    A key goes before the mapping that contains it, in any order: `strategy={fsdp: 4}` sets the section, and
    `strategy.fsdp.floor_bytes=1` one option in it. Of two overrides for one key, the last wins. `strategy.fsdp=2` sets
    the size of a strategy and keeps its other options.

    Args:
        tree: The values of the file.
        overrides: `key=value` arguments; the value is YAML.

    Returns:
        The problems of the overrides themselves, and key -> the argument that sets it.
    """
    problems: list[Problem] = []
    given_by: dict[str, str] = {}
    valid: list[tuple[list[str], Any]] = []
    for text in overrides:
        key, equals, value_text = text.partition("=")
        if not equals or not all(split_key(key)) or not is_printable(key):
            given_by[text or EMPTY] = _shorten(text)
            problems.append(Problem(text or EMPTY, "it must be key=value, such as train.steps=20."))
            continue
        document = read_yaml(value_text)
        parts = split_key(key)
        if len(parts) == 2 and parts[0] == "strategy" and not isinstance(document.value, dict):
            parts.append("size")
        given_by[".".join(parts)] = _shorten(text)
        problems += [Problem(".".join(parts), problem.message) for problem in document.problems]
        if not document.problems:
            valid.append((parts, document.value))
    for parts, value in sorted(valid, key=lambda override: len(override[0])):
        expand_sizes(tree)
        problems += _set(tree, parts, value)
    return problems, given_by


def expand_sizes(tree: dict[str, Any]) -> None:
    """Writes `strategy: {fsdp: 4}` as `strategy: {fsdp: {size: 4}}`, and `strategy: fsdp` with size -1, in place."""
    strategy = tree.get("strategy")
    if isinstance(strategy, str) and strategy.isidentifier():
        tree["strategy"] = {strategy: {"size": -1}}
    if isinstance(strategy, dict):
        for name, value in strategy.items():
            if not isinstance(value, dict):
                strategy[name] = {"size": value}


def _shorten(text: str) -> str:
    """Returns an override on one line, without secrets."""
    if not text.strip():
        return f"{text!r}, {EMPTY}"
    text = redact_override(text)
    short = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
    return short if is_printable(short) else repr(short)


def _set(tree: dict[str, Any], parts: list[str], value: Any) -> list[Problem]:
    """Sets one value and adds missing mappings above it."""
    for depth, part in enumerate(parts[:-1], 1):
        if tree.get(part) is None:
            tree[part] = {}
        if not isinstance(tree[part], dict):
            above = ".".join(parts[:depth])
            return [Problem(".".join(parts), f"{above} is {tree[part]!r}, which cannot have keys below it.")]
        tree = tree[part]
    tree[parts[-1]] = value
    return []
