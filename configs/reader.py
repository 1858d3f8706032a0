"""YAML text to plain Python values, with the line of every key.

PyYAML reads YAML 1.1, where `3e-4` is text, `on` is true, `010` is eight and the second of two equal keys wins without
a word. Here numbers and booleans follow YAML 1.2 and a key given twice is an error.
"""

import re
from typing import Any, NamedTuple

import yaml

from .errors import Problem


class Document(NamedTuple):
    """What a YAML text holds.

    Attributes:
        value: Dicts, lists and scalars.
        lines: Line (from 1) of each key, by its path: `("train", "steps")`.
        problems: Syntax errors, keys given twice, keys that are not text.
    """

    value: Any
    lines: dict[tuple[str, ...], int]
    problems: list[Problem]


SCALARS = [
    (f"tag:yaml.org,2002:{tag}", re.compile(rf"(?:{pattern})\Z"))
    for tag, pattern in (
        ("null", r"~|null|Null|NULL|"),
        ("bool", r"true|True|TRUE|false|False|FALSE"),
        ("int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+"),
        ("float", r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"),
        ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"),
    )
]


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2."""

    yaml_implicit_resolvers = {None: SCALARS}  # noqa: RUF012  (an attribute of PyYAML; None: whatever the first letter)


def read_yaml(text: str) -> Document:
    """Reads one YAML document.

    Args:
        text: YAML; empty text is an empty document, whose value is None.

    Returns:
        The values, the line of each key, and what is wrong with the text; the value leaves out what is wrong.
    """
    lines: dict[tuple[str, ...], int] = {}
    problems: list[Problem] = []
    value = None
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        value = None if node is None else _construct(loader, node, (), lines, problems)
    except yaml.YAMLError as error:
        problems.append(Problem("", f"not valid YAML: {_one_line(error)}"))
    except RecursionError:
        problems.append(Problem("", "not usable YAML: the values nest too deeply, or one holds itself"))
    return Document(value, lines, problems)


def _construct(loader: Loader, node: yaml.Node, path: tuple[str, ...], lines: dict, problems: list[Problem]) -> Any:
    """Returns the value of a node; keeps the line of every key below it."""
    if isinstance(node, yaml.MappingNode):
        return _construct_mapping(loader, node, path, lines, problems)
    if isinstance(node, yaml.SequenceNode):
        return [_construct(loader, item, (*path, str(i)), lines, problems) for i, item in enumerate(node.value)]
    return loader.construct_object(node)


def _construct_mapping(
    loader: Loader, node: yaml.MappingNode, path: tuple[str, ...], lines: dict, problems: list[Problem]
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(Problem("", f"line {line}: a key must be text, not a list or a mapping"))
            continue
        key = key_node.value
        below = (*path, key)
        if key in result:
            dotted = ".".join(below)
            problems.append(
                Problem("", f"line {line}: {dotted} is given twice, first on line {lines[below]}. Keep one of them.")
            )
            continue
        lines[below] = line
        result[key] = _construct(loader, value_node, below, lines, problems)
    return result


def _one_line(error: yaml.YAMLError) -> str:
    """Returns a YAML error as `line 3, column 5: what (context)`."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    context = f" {error.context}" if error.context else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}{context}"
