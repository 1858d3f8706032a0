"""Validates plain values against dataclasses with pydantic and reports all errors at once, by key.

pydantic checks types, ranges, unions, unknown and missing keys. A dataclass needs no pydantic: ranges are
`Annotated[int, Ge(1)]` of annotated_types, and what its `__post_init__` raises as a `UserError` becomes a problem too.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import takewhile
from math import inf
from typing import Any, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from ..layouts.paths import flatten_mapping
from ..mesh.errors import UserError, is_printable
from ..parallel.options import rule_of
from .config_errors import Problem
from .key_names import explain_single_value, unknown_key
from .yaml_reader import INVALID

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
BYTE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMG]i?B|B|)")
BYTE_KEYS = ("_bytes", "_floor")
"""Endings of the names of integers that also accept a size such as "64KiB"."""
MAX_FLOAT32 = 3.4e38
FREE_TEXT = "sample.prompt"
"""The key that may contain control characters."""
ENVIRONMENT = "environment"
"""The mapping of environment variables: its values may be secrets and are never shown."""
DOTTED = re.compile(r"\w+(?:\.\w+)+")
"""A key in a message."""

KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list", dict: "mapping"}


@cache
def make_adapter(cls: Any) -> TypeAdapter[Any]:
    """Returns pydantic's validator of a dataclass, with the same configuration for the dataclasses inside it."""
    optional: Any = cls | None  # pydantic does not accept a configuration for a bare dataclass
    return TypeAdapter(optional, config=STRICT)


def to_dataclass(cls: type, value: Any, path: str, problems: list[Problem]) -> Any:
    """Builds a dataclass from a mapping.

    Args:
        cls: A dataclass.
        value: The mapping from YAML; None is an empty mapping.
        path: The dotted key of `value`, for messages.
        problems: Receives unknown keys, missing keys, invalid values and the errors of the dataclass itself.

    Returns:
        The instance, with defaults in place of invalid values; None if a required value is missing or invalid.
    """
    tree = _convert_sizes({} if value is None else value)
    own = _value_problems(tree, path) if isinstance(tree, dict) else []
    problems.extend(own)
    reported = {problem.path for problem in own}
    invalid: set[str] = set()
    while True:
        try:
            return make_adapter(cls).validate_json(json.dumps(tree))
        except ValidationError as error:
            errors = _by_path(error.errors(include_url=False), tree)
        if _convert_values(tree, errors):
            continue
        found = [problem for keys, each in errors.items() for problem in _problems(cls, path, keys, each, invalid)]
        problems.extend(each for each in found if each not in problems and each.path not in reported)
        invalid.update(key for problem in found for key in _invalid_keys(problem, path))
        if not isinstance(tree, dict):
            tree = {}
        elif not _remove_values(tree, errors):
            return _default(cls)


def below(path: str, *keys: Any) -> str:
    """Returns the dotted key of an entry below another."""
    return ".".join(map(str, (*((path,) if path else ()), *keys)))


def show_value(value: Any) -> str:
    """Returns a value with its type: `'ten' (string)`."""
    if value is None:
        return "null"
    text = repr(value).lower() if isinstance(value, bool) else repr(value)
    kind = KINDS.get(type(value), type(value).__name__)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({kind})"


def parse_bytes(text: str) -> int | str:
    """Returns 65536 for "64KiB", or the text itself if it is not a size."""
    match = BYTES.fullmatch(text)
    size = float(match[1]) * BYTE_UNITS[match[2]] if match else 0.5
    return int(size) if size.is_integer() else text


def _convert_sizes(value: Any, name: str = "") -> Any:
    """Returns a copy of a tree with sizes such as "64KiB" as integers."""
    if isinstance(value, Mapping):
        return {key: _convert_sizes(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_convert_sizes(item) for item in value]
    return parse_bytes(value) if isinstance(value, str) and name.endswith(BYTE_KEYS) else value


def _value_problems(tree: dict[str, Any], path: str) -> list[Problem]:
    """Returns the problems of control characters, and of finite numbers that devices would read as infinite."""
    problems = []
    for name, value in flatten_mapping(tree).items():
        key = below(path, name)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str) and not is_printable(item) and key != FREE_TEXT:
                problems.append(Problem(key, f"{key} must not contain control characters, got {item!r}."))
            elif isinstance(item, float) and MAX_FLOAT32 < abs(item) < inf:
                rule = f"a number of float32, at most {MAX_FLOAT32:g}"
                problems.append(Problem(key, f"{key} must be {rule}, got {show_value(item)}."))
    return problems


def _by_path(errors: list[ErrorDetails], tree: Any) -> dict[tuple[Any, ...], list[ErrorDetails]]:
    """Groups errors by the path of the value. If one type of a union fails deeper inside, only that error counts."""
    found: dict[tuple[Any, ...], list[ErrorDetails]] = {}
    for error in errors:
        keys, node = [], tree
        for place, part in enumerate(error["loc"], 1):  # also contains the names of the types of a union
            is_missing = error["type"] == "missing" and place == len(error["loc"])
            if isinstance(node, dict) and (part in node or is_missing):
                keys, node = [*keys, part], node.get(part)
            elif isinstance(node, list) and isinstance(part, int) and part < len(node):
                keys, node = [*keys, part], node[part]
        found.setdefault(tuple(keys), []).append(error)
    return {
        keys: each
        for keys, each in found.items()
        if not any(len(other) > len(keys) and other[: len(keys)] == keys for other in found)
    }


def _convert_values(tree: Any, errors: Mapping[tuple[Any, ...], list[ErrorDetails]]) -> bool:
    """Converts 1e3 to an integer and an empty section to an empty mapping, in place; returns whether it found any."""
    found = False
    for keys, (error, *_) in errors.items():
        value = error["input"]
        if error["type"] == "int_type" and isinstance(value, float) and value.is_integer():
            _set(tree, keys, int(value))
        elif error["type"] == "dataclass_type" and value is None:
            _set(tree, keys, {})
        else:
            continue
        found = True
    return found


def _set(tree: Any, keys: tuple[Any, ...], value: Any) -> None:
    for key in keys[:-1]:
        tree = tree[key]
    tree[keys[-1]] = value


def _remove_values(tree: dict[str, Any], errors: Iterable[tuple[Any, ...]]) -> bool:
    """Removes the values at some paths, so that their defaults count; a list is removed as a whole."""
    found = False
    for keys in errors:
        node, names = tree, _names(keys)
        for name in names[:-1]:
            node = node.get(name, {})
        found |= bool(names) and node.pop(names[-1], INVALID) is not INVALID
    return found


def _problems(
    cls: type, path: str, keys: tuple[Any, ...], errors: list[ErrorDetails], invalid: set[str]
) -> list[Problem]:
    """Returns the problems of one value. The types of a union are joined with "or"."""
    error, names = errors[-1], _names(keys)
    key = below(path, *names)
    item = key + "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in keys[len(names) :])
    if error["type"] == "value_error":
        return _own_problems(error, path, invalid)
    if error["type"] == "unexpected_keyword_argument":
        valid = [each.name for each in fields(_class_at(cls, keys[:-1])) if each.init]
        parent = item.removesuffix(str(keys[-1])).removesuffix(".")
        return [unknown_key(parent, str(keys[-1]), valid)._replace(path=key)]
    if error["type"] == "missing" and isinstance(error["loc"][-1], str):
        return [Problem(key, f"{item} is required.")]
    rules, value = list(dict.fromkeys(map(_rule, errors))), error["input"]
    given = f"a {KINDS.get(type(value), 'value')}" if ENVIRONMENT in keys else show_value(value)
    return [Problem(key, f"{item} must be {' or '.join(rules)}, got {given}.{_fix(rules, value, key)}")]


def _names(keys: tuple[Any, ...]) -> list[str]:
    """Returns the part of a path before the first index of a list."""
    return [*takewhile(lambda key: isinstance(key, str), keys)]


def _own_problems(error: ErrorDetails, path: str, invalid: set[str]) -> list[Problem]:
    """Returns what the dataclass itself raised, without the errors that follow from other problems.

    A check that mentions a key with an invalid value or a misspelled name did not see what the user wrote.
    """
    raised = error.get("ctx", {})["error"]
    if not isinstance(raised, UserError):
        raise raised
    lines = [
        line
        for line in str(raised).splitlines()
        if not any(re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", line) for key in invalid)
    ]
    named = [match[0] if (match := re.match(r"[\w.]*\w", line)) else "" for line in lines]
    return [Problem(key if key.startswith(f"{path}.") else path, line) for key, line in zip(named, lines, strict=True)]


def _invalid_keys(problem: Problem, path: str) -> set[str]:
    """Returns the keys below `path` that a problem makes unreliable: its own, its parent's, and a suggested one."""
    keys = {
        problem.path,
        problem.path.rpartition(".")[0],
        *DOTTED.findall(problem.message.partition("Did you mean")[2]),
    }
    return {key for key in keys if key.startswith(f"{path}.")}


def _class_at(cls: type, keys: tuple[Any, ...]) -> Any:
    """Returns the dataclass at a path, through mappings and lists of dataclasses."""
    for key in keys:
        cls = get_type_hints(cls)[key] if is_dataclass(cls) else get_args(cls)[0 if isinstance(key, int) else -1]
    return cls


def _rule(error: ErrorDetails) -> str:
    if error["type"] == "missing":
        return f"a list of {error['loc'][-1] + 1} values"  # pyright: ignore[reportOperatorIssue]
    return rule_of(error)


def _fix(rules: list[str], value: Any, key: str) -> str:
    if rules == ["a string"] and isinstance(value, int | float):
        return f" Quote it to make it a string: '\"{value}\"'."
    if "." not in key:
        return explain_single_value(key, value)
    return f" Write {{name: {value}}}." if key == "optimizer.schedule" and isinstance(value, str) else ""


def _default(cls: type) -> Any:
    try:
        return cls()
    except (TypeError, UserError):
        return None
