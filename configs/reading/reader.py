"""YAML text to plain Python values, with the line of every key.

PyYAML reads YAML 1.1, where `3e-4` is text, `on` is true, `010` is eight, `1_000` is a thousand and the second of two
equal keys wins without a word. Here numbers and booleans follow YAML 1.2 and a key given twice is an error.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ...mesh.text import is_printable, printable
from ..errors import Problem

MOST_BYTES = 2**20
"""Of a file, or of the value of an override."""
MOST_VALUES = 20_000
"""Keys and values of a document, each alias counted as often as it stands for something."""
MOST_DEPTH = 40
"""Mappings and lists within each other."""
MOST_BITS = 1024
"""Of a whole number; a float holds no more."""
MOST_KEY = 500
"""Characters of a key."""

TOO_DEEP = f"the values nest too deeply, or one holds itself; at most {MOST_DEPTH} lists and mappings lie in each other"
NESTED = ". A key that has a value has no keys below it: write fsdp: {size: 4, floor_bytes: 64KiB}"
COLLECTIONS = (None, "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")
UNREADABLE: Any = object()
"""Stands for a value that was left out, with a problem noted."""


class Unusable(Exception):
    """A document whose values cannot be built; the message says why."""


class Document(NamedTuple):
    """What a YAML text holds.

    Attributes:
        value: Dicts, lists and scalars.
        lines: Line (from 1) of each key, by its path: `("train", "steps")`.
        problems: Syntax errors, keys given twice, keys that are not text.
        is_empty: Whether the text holds nothing, or comments only.
    """

    value: Any
    lines: dict[tuple[str, ...], int]
    problems: list[Problem]
    is_empty: bool = False


SCALARS = [
    (f"tag:yaml.org,2002:{tag}", re.compile(rf"(?:{pattern})\Z"))
    for tag, pattern in (
        ("null", r"~|null|Null|NULL|"),
        ("bool", r"true|True|TRUE|false|False|FALSE"),
        ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
        ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"),
        ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"),
    )
]


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2."""

    yaml_implicit_resolvers = {None: SCALARS}  # noqa: RUF012  (an attribute of PyYAML; None: whatever the first letter)


def _integer(loader: Loader, node: yaml.Node) -> int:
    """Reads an integer of YAML 1.2, whose base only the prefixes 0o and 0x change."""
    text = str(loader.construct_scalar(node))  # pyright: ignore[reportArgumentType]
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


Loader.add_constructor("tag:yaml.org,2002:int", _integer)


def read_text(path: Path) -> tuple[str, list[Problem]]:
    """Reads a text file that is no larger than a config can be.

    Args:
        path: A regular file.

    Returns:
        The text, without a byte order mark, and what is wrong with the file; then the text is empty.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as error:
        return "", [Problem("", f"the file cannot be read: {error.strerror or error}. Check its permissions.")]
    if len(raw) > MOST_BYTES:
        return "", [Problem("", f"the file has more than {MOST_BYTES:,} bytes: that is no config.")]
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        given = f"line {line}: the byte 0x{raw[error.start]:02x} is not UTF-8"
        return "", [Problem("", f"the file cannot be read: {given}. Save the file as text in UTF-8.")]
    if not text.strip():
        return "", [Problem("", "the file is empty. Give it one section at least, such as train: {steps: 100}.")]
    return text, []


def read_yaml(text: str) -> Document:
    """Reads one YAML document.

    Args:
        text: YAML; empty text is an empty document, whose value is None.

    Returns:
        The values, the line of each key, and what is wrong with the text; the value leaves out what is wrong.
    """
    reading = _Reading({}, [])
    value = node = None
    try:
        reading.loader = Loader(text)
        node = reading.loader.get_single_node()
        value = None if node is None else reading.value_of(node, ())
        value = None if value is UNREADABLE else value
    except yaml.YAMLError as error:
        reading.problems.append(Problem("", f"not valid YAML: {_one_line(error)}"))
    except (Unusable, RecursionError) as error:
        reason = str(error) if isinstance(error, Unusable) else TOO_DEEP
        reading.problems.append(Problem("", f"not usable YAML: {reason}"))
    return Document(value, reading.lines, reading.problems, is_empty=node is None)


class _Reading:
    """One document on its way from nodes to values.

    An alias is a node that stands in several places: followed without a limit, a few lines hold billions of values.
    """

    loader: Loader

    def __init__(self, lines: dict[tuple[str, ...], int], problems: list[Problem]) -> None:
        self.lines = lines
        self.problems = problems
        self.num_values = 0

    def value_of(self, node: yaml.Node, path: tuple[str, ...]) -> Any:
        """Returns the value of a node; keeps the line of every key below it.

        Raises:
            Unusable: The document holds too many values, or they nest too deeply.
        """
        self.num_values += 1
        if self.num_values > MOST_VALUES:
            raise Unusable(f"it holds more than {MOST_VALUES:,} values, each alias counted as often as it is used")
        if len(path) > MOST_DEPTH:
            raise Unusable(TOO_DEEP)
        if isinstance(node, yaml.CollectionNode) and node.tag not in COLLECTIONS:
            line, tag = node.start_mark.line + 1, printable(node.tag.removeprefix("tag:yaml.org,2002:"))
            self.problems.append(Problem("", f"line {line}: the tag {tag!r} has no meaning here. Leave it out."))
            return UNREADABLE
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            values = [self.value_of(item, (*path, str(i))) for i, item in enumerate(node.value)]
            return [value for value in values if value is not UNREADABLE]
        return self.scalar(node, path)

    def mapping(self, node: yaml.MappingNode, path: tuple[str, ...]) -> dict[str, Any]:
        """Returns a mapping, without the keys that cannot be keys."""
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            problem = _bad_key(key_node)
            key = key_node.value
            if not problem and key in result:
                dotted, first = ".".join((*path, key)), self.lines[*path, key]
                problem = f"{dotted} is given twice, first on line {first}. Keep one of them."
            if problem:
                self.problems.append(Problem("", f"line {line}: {problem}"))
                continue
            self.lines[*path, key] = line
            value = self.value_of(value_node, (*path, key))
            if value is not UNREADABLE:
                result[key] = value
        return result

    def scalar(self, node: yaml.Node, path: tuple[str, ...]) -> Any:
        """Returns a text, number, truth value or null; UNREADABLE, with a problem noted, where it cannot be one."""
        given = f"line {node.start_mark.line + 1}: {'.'.join(path) or 'the value'}"
        try:
            value = self.loader.construct_object(node)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError):  # PyYAML's, of a tag such as !!int
            text = printable(str(node.value)[:40])
            self.problems.append(Problem("", f"{given}: {text!r} cannot be read as {node.tag.rpartition(':')[2]}."))
            return UNREADABLE
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            self.problems.append(Problem("", f"{given}: a whole number of {value.bit_length():,} bits is too large."))
            return UNREADABLE
        if isinstance(value, str) and not _is_unicode(value):
            self.problems.append(Problem("", f"{given}: {value[:40]!r} holds half a character (a lone surrogate)."))
            return UNREADABLE
        return value


def _bad_key(node: yaml.Node) -> str | None:
    """Why a node cannot be a key; None where it can."""
    if not isinstance(node, yaml.ScalarNode):
        return "a key must be text, not a list or a mapping"
    if not node.value:
        return "a key is empty. Write a name before the colon."
    if len(node.value) > MOST_KEY:
        return f"a key of {len(node.value):,} characters, {node.value[:40]!r}..., is too long; {MOST_KEY} are the most."
    if not is_printable(node.value):
        return f"the key {node.value!r} holds characters that cannot be shown. Write it in letters."
    return None


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _one_line(error: yaml.YAMLError) -> str:
    """Returns a YAML error as `line 3, column 5: what (context)`."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    context = f" {error.context}" if error.context else ""
    hint = NESTED if error.problem == "mapping values are not allowed here" else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}{context}{hint}"
