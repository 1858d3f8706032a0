"""Reads YAML 1.2 into plain Python values and keeps the line of every key.

PyYAML implements YAML 1.1: `3e-4` is a string, `on` is true, `010` is eight, `1_000` is a thousand, and the second of
two equal keys silently wins. This reader follows YAML 1.2 for numbers and booleans and rejects duplicate keys.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..mesh.errors import printable
from .config_errors import Problem

TOO_DEEP = "the values nest too deeply, or an alias contains itself"
MAX_VALUES = 100_000
"""Values of a document with its aliases expanded: a few hundred bytes of aliases of aliases make billions."""
TOO_MANY = (
    f"its aliases expand to more than {MAX_VALUES:,} values, which no config needs. "
    "Write the values without aliases of aliases"
)
NESTED = ". A key with a value cannot have keys below it: write fsdp: {size: 4, floor_bytes: 64KiB}"
INVALID: Any = object()
"""Marks an invalid value, for which a problem was recorded."""


class Document(NamedTuple):
    """The contents of a YAML text.

    Attributes:
        value: Dicts, lists and scalars.
        lines: The line (from 1) of each key by its path, such as `("train", "steps")`.
        problems: Syntax errors, duplicate keys, keys that are not strings.
        is_empty: True if the text contains nothing but comments.
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
TAGS = frozenset(f"tag:yaml.org,2002:{tag}" for tag in ("null", "bool", "int", "float", "str", "seq", "map"))


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2."""

    yaml_implicit_resolvers = {None: SCALARS}  # noqa: RUF012  (PyYAML's attribute; None means any first letter)


def _integer(loader: Loader, node: yaml.Node) -> int:
    """Reads an integer of YAML 1.2: only the prefixes 0o and 0x change the base."""
    text = str(loader.construct_scalar(node))  # pyright: ignore[reportArgumentType]
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


Loader.add_constructor("tag:yaml.org,2002:int", _integer)


def read_file(path: Path) -> Document:
    """Reads a YAML file; a file that cannot be read or is empty is a problem too."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        problem = f"the file cannot be read: {error.strerror or error}. Check its permissions."
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        byte = f"line {line}: the byte 0x{error.object[error.start]:02x} is not valid UTF-8"
        problem = f"the file cannot be read: {byte}. Save the file as text in UTF-8."
    else:
        if text.strip():
            return read_yaml(text)
        problem = "the file is empty. Add at least one section, such as train: {steps: 100}."
    return Document(None, {}, [Problem("", problem)])


def read_yaml(text: str) -> Document:
    """Reads one YAML document.

    Args:
        text: The YAML text; the value of empty text is None.

    Returns:
        The values, the line of each key, and the problems; invalid values are left out.
    """
    reading = _Reading()
    value = node = None
    try:
        reading.loader = Loader(text)
        node = reading.loader.get_single_node()
        value = None if node is None else reading.read_node(node, ())
    except yaml.YAMLError as error:
        reading.problems.append(Problem("", f"invalid YAML: {_on_one_line(error)}"))
    except RecursionError:
        reading.problems.append(Problem("", f"invalid YAML: {TOO_DEEP}"))
    except TooManyValues:
        reading.problems.append(Problem("", f"invalid YAML: {TOO_MANY}."))
    return Document(None if value is INVALID else value, reading.lines, reading.problems, is_empty=node is None)


class TooManyValues(Exception):
    """A document with more than MAX_VALUES values, and more than its text contains."""


class _Reading:
    """Converts the nodes of one document to values."""

    loader: Loader

    def __init__(self) -> None:
        self.lines: dict[tuple[str, ...], int] = {}
        self.problems: list[Problem] = []
        self._seen: set[int] = set()
        self._repeated = 0

    def read_node(self, node: yaml.Node, path: tuple[str, ...]) -> Any:
        """Returns the value of a node and records the lines of the keys below it.

        Raises:
            TooManyValues: Aliases repeat more nodes than MAX_VALUES; values that the text itself contains do not count.
        """
        if id(node) in self._seen:
            self._repeated += 1
            if self._repeated > MAX_VALUES:
                raise TooManyValues
        self._seen.add(id(node))
        if node.tag not in TAGS:
            tag = printable(node.tag.replace("tag:yaml.org,2002:", "!!"))
            return self._reject(node, f"the tag {tag!r} is not supported. Remove it.")
        if isinstance(node, yaml.MappingNode):
            return self.read_mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            values = [self.read_node(item, (*path, str(i))) for i, item in enumerate(node.value)]
            return [value for value in values if value is not INVALID]
        try:
            return self.loader.construct_object(node)
        except (ValueError, LookupError):  # an explicit tag such as !!int
            kind, text = node.tag.rpartition(":")[2], printable(str(node.value)[:40])
            return self._reject(node, f"{'.'.join(path) or 'the value'}: {text!r} is not a valid {kind}.")

    def read_mapping(self, node: yaml.MappingNode, path: tuple[str, ...]) -> dict[str, Any]:
        """Returns a mapping without invalid keys and values."""
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode):
                self._reject(key_node, "a key must be a string, not a list or a mapping.")
            elif not key:
                self._reject(key_node, "a key is empty. Write a name before the colon.")
            elif key in result:
                dotted, first = ".".join((*path, key)), self.lines[*path, key]
                self._reject(key_node, f"{dotted} is given twice, first on line {first}. Keep one of them.")
            else:
                self.lines[*path, key] = key_node.start_mark.line + 1
                if (value := self.read_node(value_node, (*path, key))) is not INVALID:
                    result[key] = value
        return result

    def _reject(self, node: yaml.Node, message: str) -> Any:
        self.problems.append(Problem("", f"line {node.start_mark.line + 1}: {message}"))
        return INVALID


def _on_one_line(error: yaml.YAMLError) -> str:
    """Returns a YAML error as `line 3, column 5: problem (context)`."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    context = f" {error.context}" if error.context else ""
    hint = NESTED if error.problem == "mapping values are not allowed here" else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}{context}{hint}"
