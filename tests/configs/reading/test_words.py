"""Types and values as somebody reads them who writes YAML."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pytest
from spmdkit.configs.reading.limits import AtLeast
from spmdkit.configs.reading.words import describe, listed, shown


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (int, "a whole number"),
        (bool, "true or false"),
        (Any, "any value"),
        (Annotated[float, AtLeast(0.5)], "a number, at least 0.5"),
        (Literal["none", "dots", 2], "one of none, dots, 2"),
        (str | None, "text or null"),
        (tuple[str, ...], "a list of text"),
        (tuple[int, int, int], "a list of 3 values"),
        (tuple[str | tuple[str, ...], ...], "a list of text or a list of text"),
        (Mapping[str, Any], "a mapping (key: value)"),
    ],
    ids=str,
)
def test_types(hint, expected):
    assert describe(hint) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "null (nothing)"),
        (True, "True (true or false)"),
        (3, "3 (a whole number)"),
        ("ten", "'ten' (text)"),
        ({"a": 1}, "{'a': 1} (a mapping)"),
        (b"raw", "b'raw' (bytes)"),
        ("x" * 58, f"'{'x' * 58}' (text)"),
        ("x" * 59, f"'{'x' * 56}... (text)"),
    ],
)
def test_values(value, expected):
    assert shown(value) == expected


def test_lists_of_words():
    assert [listed(list(words), "or") for words in ("a", "ab", "abc")] == ["a", "a or b", "a, b or c"]
