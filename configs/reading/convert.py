"""Plain values from YAML to the typed fields of dataclasses; every mismatch is noted, none raised."""

import dataclasses
import math
import re
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ...mesh.errors import UserError
from ...mesh.near_miss import did_you_mean
from ...mesh.text import is_printable
from ..errors import Problem
from ..secret_variables import redact
from .limits import LARGEST_NUMBER, SMALLEST_NUMBER, largest
from .synonyms import meant_by, remark
from .words import describe, shown

BYTE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
FREE_TEXT = "sample.prompt"
"""The key whose text may hold anything."""


DOTTED = re.compile(r"\w+(?:\.\w+)+")
"""A key in a message."""
NAMED = ("optimizer.schedule",)
"""Keys whose value is a mapping that holds a name."""


class Mismatch(Exception):
    """A value that does not fit its type; the message says what was expected."""


class OutOfRange(Mismatch):
    """A value of the right type that nothing could compute with."""


def to_dataclass(cls: type, value: Any, path: str, problems: list[Problem]) -> Any:
    """Builds a dataclass from a mapping.

    Args:
        cls: A dataclass; its annotations are the types, its defaults stand for missing keys.
        value: What YAML gave for it; None is an empty mapping.
        path: Dotted key of `value`, for messages.
        problems: Unknown keys, missing keys, wrong types and what the dataclass itself refuses are added here.

    Returns:
        The instance, with defaults where something was wrong; None where even that cannot be built.
    """
    if value is None:
        value = {}
    if not isinstance(value, Mapping):
        problems.append(Problem(path, f"{path} must be a mapping (key: value), not {shown(value)}."))
        return to_dataclass(cls, {}, path, [])
    hints = get_type_hints(cls, include_extras=True)
    names = [f.name for f in dataclasses.fields(cls) if f.init]
    problems.extend(unknown_key(below(path, key), names) for key in value if key not in names)
    given = {}
    for name in names:
        if name in value:
            to_field(hints[name], value[name], below(path, name), problems, given)
    missing = [f.name for f in dataclasses.fields(cls) if f.name not in given and not has_default(f)]
    left_out = [below(path, name) for name in missing if name not in value]
    problems.extend(Problem(key, f"{key} must be given.") for key in left_out)
    return None if missing else _build(cls, given, path, problems)


def to_field(hint: Any, value: Any, path: str, problems: list[Problem], given: dict[str, Any]) -> None:
    """Converts one value and keeps it in `given` under the last part of its path, or notes what is wrong with it."""
    name = path.rpartition(".")[2]
    if dataclasses.is_dataclass(hint):
        given[name] = to_dataclass(hint, value, path, problems)  # pyright: ignore[reportArgumentType]
        return
    inner = options_by_key(hint)
    if inner is not None and isinstance(value, Mapping):
        given[name] = _by_key(inner, value, path, problems)
        return
    if isinstance(value, str) and name.endswith(("_bytes", "_floor")):
        value = parse_bytes(value)
    try:
        given[name] = _within_limits(to_type(hint, value), path)
    except Mismatch as mismatch:
        safe = redact(value) if name == "environment" and isinstance(value, Mapping) else value
        problems.append(Problem(path, f"{path} must be {mismatch}, not {shown(safe)}.{_remedy(hint, value, path)}"))


def _by_key(options: type, value: Mapping[Any, Any], path: str, problems: list[Problem]) -> dict[Any, Any]:
    """Converts the options of each key; where something is wrong with them the key is left out."""
    found = {}
    for key, item in value.items():
        wrong: list[Problem] = []
        found[key] = to_dataclass(options, item, below(path, key), wrong)
        if wrong:
            problems += wrong
            del found[key]
    return found


def options_by_key(hint: Any) -> type | None:
    """Returns the dataclass of the values of a mapping from free keys, such as patterns, to options; else None."""
    origin, arguments = get_origin(hint), get_args(hint)
    of_mapping = isinstance(origin, type) and issubclass(origin, Mapping) and len(arguments) == 2
    options = arguments[1] if of_mapping else None
    return options if isinstance(options, type) and dataclasses.is_dataclass(options) else None


def _remedy(hint: Any, value: Any, path: str) -> str:
    """What to write in place of a value of the wrong type, where its form shows what is meant."""
    if _is_text(hint) and isinstance(value, int | float):
        return f" Quote it to make it text: '\"{value}\"'."
    return f" Write {{name: {value}}}." if path in NAMED and isinstance(value, str) else ""


def to_type(hint: Any, value: Any) -> Any:
    """Returns `value` as the type that `hint` says.

    Raises:
        Mismatch: If it is of another type, or out of its range.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _in_range(to_type(arguments[0], value), arguments[1])
    if origin is Literal:
        return _one_of(arguments, value)
    if origin in (Union, types.UnionType):
        return _any_of(arguments, value, hint)
    if origin is tuple:
        return _to_tuple(arguments, value, hint)
    if origin is not None and issubclass(origin, Mapping):
        return _to_mapping(arguments, value, hint)
    return value if hint is Any else _to_scalar(origin or hint, value)


def _to_scalar(hint: type, value: Any) -> Any:
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return _to_float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint in (Mapping, dict) and isinstance(value, Mapping):
        return dict(value)
    if hint is float and isinstance(value, float) and not math.isfinite(value):
        raise Mismatch(f"{describe(hint)}, and finite")
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise Mismatch(describe(hint))


def _to_float(value: float) -> float:
    """Returns a number that float32 can hold, without the sign of a zero."""
    if isinstance(value, float) and not math.isfinite(value):
        raise OutOfRange("a number, and finite")
    if not -LARGEST_NUMBER <= value <= LARGEST_NUMBER:
        raise OutOfRange(f"a number of float32, at most {LARGEST_NUMBER:g}")
    if value and abs(value) < SMALLEST_NUMBER:
        raise OutOfRange(f"0 or a number of float32, at least {SMALLEST_NUMBER:g}")
    return float(value) + 0.0


def _within_limits(value: Any, path: str) -> Any:
    """Returns the value of a key, unless it is a number too large to compute with or a text that cannot be shown."""
    parts = value if isinstance(value, tuple) else (value,)
    most = largest(path)
    for part in parts:
        if isinstance(part, int) and not isinstance(part, bool) and abs(part) > most:
            raise Mismatch(f"at most {most}" if part > 0 else f"at least {-most}")
        if isinstance(part, str) and path != FREE_TEXT and not is_printable(part):
            raise Mismatch("text without control characters")
    return value


def _in_range(value: Any, allowed: Any) -> Any:
    if value is not None and (value < allowed.minimum or math.isnan(value)):
        raise Mismatch(f"at least {allowed.minimum}")
    return value


def _one_of(choices: tuple[Any, ...], value: Any) -> Any:
    value = "none" if value is None else value
    for choice in choices:
        if value == choice and type(value) is type(choice):
            return choice
    near = did_you_mean(value, [c for c in choices if isinstance(c, str)]) if isinstance(value, str) else ""
    raise Mismatch(f"one of {', '.join(map(str, choices))}{' (' + near.strip() + ')' if near else ''}")


def _any_of(hints: tuple[Any, ...], value: Any, whole: Any) -> Any:
    exact = [hint for hint in hints if isinstance(hint, type) and type(value) is hint]
    for hint in (*exact, *hints):
        try:
            return to_type(hint, value)
        except OutOfRange:
            raise
        except Mismatch:
            continue
    raise Mismatch(describe(whole))


def _to_tuple(hints: tuple[Any, ...], value: Any, whole: Any) -> tuple[Any, ...]:
    repeated = len(hints) == 2 and hints[1] is Ellipsis
    if not isinstance(value, list | tuple) or not (repeated or len(value) == len(hints)):
        raise Mismatch(describe(whole))
    return tuple(to_type(hints[0] if repeated else hints[i], item) for i, item in enumerate(value))


def _to_mapping(hints: tuple[Any, ...], value: Any, whole: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise Mismatch(describe(whole))
    return {key: to_type(hints[1] if hints else Any, item) for key, item in value.items()}


def _build(cls: type, given: dict[str, Any], path: str, problems: list[Problem]) -> Any:
    """Makes the instance; what its own checks refuse becomes problems, but for what only follows from others."""
    try:
        return cls(**given)
    except UserError as error:
        doubtful = _doubtful_keys(problems, path)
        lines = [line for line in str(error).splitlines() if not doubtful & set(DOTTED.findall(line))]
        problems.extend(Problem(_named_in(line, path), line) for line in lines)
    needed = {f.name: given[f.name] for f in dataclasses.fields(cls) if not has_default(f)}
    try:
        return cls(**needed)
    except UserError:
        return None


def _doubtful_keys(problems: list[Problem], path: str) -> set[str]:
    """The keys below `path` whose values were left out as wrong, or stand under a name that does not exist.

    What is checked without them is not what was written: data.files of the wrong type is not empty.
    """
    meant = [key for problem in problems for key in DOTTED.findall(problem.message.partition("Did you mean ")[2])]
    return {key for key in (*(problem.path for problem in problems), *meant) if key.startswith(f"{path}.")}


def _named_in(message: str, path: str) -> str:
    """Returns the dotted key below `path` that a message begins with, or `path`."""
    key = re.match(r"[\w.]*\w", message)
    return key[0] if key and key[0].startswith(f"{path}.") else path


def unknown_key(path: str, valid: list[str], kind: str = "key") -> Problem:
    """Returns the problem of a key that does not exist, with the nearest that does, or all there are."""
    parent, _, name = path.rpartition(".")
    meant = meant_by(path)
    if meant and parent and meant.rpartition(".")[2] in valid:
        meant = f"{parent}.{meant.rpartition('.')[2]}"
    near = did_you_mean(name, valid, prefix=f"{parent}." if parent else "")
    near = f" Did you mean {meant}?{remark(name)}" if meant else near
    return Problem(path, f"{path} is not a {kind}.{near or f' The {kind}s here: ' + ', '.join(valid) + '.'}")


def parse_bytes(text: str) -> int | str:
    """Returns `64KiB` as 65536; the text itself where it is no size."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMG]i?B|B|)\s*", text)
    if match is None:
        return text
    size = float(match[1]) * BYTE_UNITS[match[2]]
    return int(size) if size.is_integer() else text


def has_default(field: dataclasses.Field) -> bool:
    """Tells whether a field of a dataclass may be left out."""
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def below(path: str, key: str) -> str:
    """Returns the dotted path of a key."""
    return f"{path}.{key}" if path else str(key)


def _is_text(hint: Any) -> bool:
    return hint is str or (get_origin(hint) is Literal)
