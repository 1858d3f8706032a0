import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge
from spmdkit.configs.validation import parse_bytes, show_value, to_dataclass
from spmdkit.mesh.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: int = 1


@dataclass(frozen=True, kw_only=True)
class Section:
    count: int = 1
    rate: float = 0.1
    flag: bool = False
    name: str = "a"
    mode: Literal["none", "full"] = "none"
    maybe: int | None = None
    files: tuple[str, ...] = ()
    betas: tuple[float, float] = (0.9, 0.95)
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: Annotated[int, Ge(1)] = 1
    words: str | tuple[str, ...] = ""
    floor_bytes: int = 0
    inner: Inner = field(default_factory=Inner)
    by_name: Mapping[str, Inner] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name == "files" and not self.files:
            raise UserError("section.name='files': section.files is empty.\nsection.name: it is short.")
        if self.count > 100:
            raise UserError(f"section.count={self.count} is too many.\nThe second line is a second problem.")


@dataclass(frozen=True, kw_only=True)
class Needy:
    width: int


def validate(value: Any, cls: type = Section) -> tuple[Any, list[tuple[str, str]]]:
    problems: list = []
    return to_dataclass(cls, value, "section", problems), [tuple(problem) for problem in problems]


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ({"count": 1e1}, "count", 10),
        ({"rate": 1}, "rate", 1.0),
        ({"flag": True}, "flag", True),
        ({"mode": "full"}, "mode", "full"),
        ({"maybe": None}, "maybe", None),
        ({"maybe": 3}, "maybe", 3),
        ({"files": ["a", "b"]}, "files", ("a", "b")),
        ({"words": ["a"]}, "words", ("a",)),
        ({"betas": [0.5, 1]}, "betas", (0.5, 1.0)),
        ({"options": {"x": [1], "y": 1.0}}, "options", {"x": [1], "y": 1.0}),
        ({"floor_bytes": "64KiB"}, "floor_bytes", 65536),
        ({"inner": {"depth": 2}}, "inner", Inner(depth=2)),
        ({"inner": None}, "inner", Inner()),
        ({"by_name": {"a/.*": {"depth": 3}, "b": None}}, "by_name", {"a/.*": Inner(depth=3), "b": Inner()}),
        (None, "count", 1),
    ],
)
def test_accepts_valid_values(given, name, expected):
    section, problems = validate(given)
    assert problems == []
    assert getattr(section, name) == expected
    assert type(getattr(section, name)) is type(expected)


@pytest.mark.parametrize(
    ("given", "path", "message"),
    [
        ({"count": "ten"}, "count", "section.count must be an integer, got 'ten' (string)."),
        ({"count": 1.5}, "count", "section.count must be an integer, got 1.5 (number)."),
        ({"count": True}, "count", "section.count must be an integer, got true (boolean)."),
        ({"count": None}, "count", "section.count must be an integer, got null."),
        ({"flag": 1}, "flag", "section.flag must be true or false, got 1 (integer)."),
        ({"name": 7}, "name", "section.name must be a string, got 7 (integer). Quote it to make it a string: '\"7\"'."),
        ({"name": "a\x1b"}, "name", "section.name must not contain control characters, got 'a\\x1b'."),
        ({"mode": "ful"}, "mode", "section.mode must be one of none, full (Did you mean full?), got 'ful' (string)."),
        ({"files": "a.txt"}, "files", "section.files must be a list, got 'a.txt' (string)."),
        ({"files": ["a", 3]}, "files", "section.files[1] must be a string, got 3 (integer). Quote it to make it a "
         "string: '\"3\"'."),
        ({"words": 3}, "words", "section.words must be a string or a list, got 3 (integer)."),
        ({"betas": [1]}, "betas", "section.betas must be a list of 2 values, got [1] (list)."),
        ({"betas": [1, 2, 3]}, "betas", "section.betas must be a list of 2 values, got [1, 2, 3] (list)."),
        ({"options": 3}, "options", "section.options must be a mapping (key: value), got 3 (integer)."),
        ({"rate": math.nan}, "rate", "section.rate must be a finite number, got nan (number)."),
        ({"rate": -math.inf}, "rate", "section.rate must be a finite number, got -inf (number)."),
        ({"rate": 1e39}, "rate", "section.rate must be a number of float32, at most 3.4e+38, got 1e+39 (number)."),
        ({"betas": [0.5, -1e39]}, "betas",
         "section.betas must be a number of float32, at most 3.4e+38, got -1e+39 (number)."),
        ({"steps": 0}, "steps", "section.steps must be at least 1, got 0 (integer)."),
        ({"floor_bytes": "big"}, "floor_bytes", "section.floor_bytes must be an integer, got 'big' (string)."),
        ({"conut": 1}, "conut", "section.conut is not a valid key. Did you mean section.count?"),
        ({"inner": {"dept": 1}}, "inner.dept",
         "section.inner.dept is not a valid key. Did you mean section.inner.depth?"),
        ({"inner": {"zzz": 1}}, "inner.zzz", "section.inner.zzz is not a valid key. Valid keys: depth."),
        ({"inner": 3}, "inner", "section.inner must be a mapping (key: value), got 3 (integer)."),
        ({"by_name": {"b": {"dept": 1}}}, "by_name.b.dept",
         "section.by_name.b.dept is not a valid key. Did you mean section.by_name.b.depth?"),
    ],
)  # fmt: skip
def test_rejects_invalid_values(given, path, message):
    _, problems = validate(given)
    assert problems == [(f"section.{path}", message)]


def test_reports_all_problems_and_keeps_valid_values():
    section, problems = validate({"count": "x", "rate": "y", "flag": True, "inner": {"depth": "z"}})
    assert {path for path, _ in problems} == {"section.count", "section.rate", "section.inner.depth"}
    assert section == Section(flag=True)


def test_rejects_a_value_that_is_not_a_mapping():
    assert validate(3) == (Section(), [("section", "section must be a mapping (key: value), got 3 (integer).")])


def test_reports_each_line_of_an_error_of_the_dataclass():
    section, problems = validate({"count": 101, "flag": True})
    assert problems == [
        ("section.count", "section.count=101 is too many."),
        ("section", "The second line is a second problem."),
    ]
    assert section == Section()


def test_requires_keys_without_default():
    assert validate({}, Needy) == (None, [("section.width", "section.width is required.")])
    assert validate({"width": 3}, Needy) == (Needy(width=3), [])
    assert len(validate({"width": "x"}, Needy)[1]) == 2


@pytest.mark.parametrize(
    "given", [{"name": "files", "files": "a.txt"}, {"name": "files", "files": 3}, {"name": "files", "fils": ["a.txt"]}]
)
def test_omits_errors_that_follow_from_another_problem(given):
    """Files in the wrong form, or under a misspelled name, are not missing."""
    _, problems = validate(given)
    assert [message.partition(" ")[0] for _, message in problems] == [
        "section.files" if "files" in given else "section.fils",
        "section.name:",
    ]
    _, problems = validate({"name": "files"})
    assert [message for _, message in problems] == [
        "section.name='files': section.files is empty.",
        "section.name: it is short.",
    ]


@pytest.mark.parametrize(
    ("text", "size"),
    [("64KiB", 65536), ("1.5 MiB", 1572864), ("2GB", 2 * 10**9), ("100", 100), ("7B", 7), ("KiB", "KiB"),
     ("0.3B", "0.3B")],
)  # fmt: skip
def test_parses_sizes_in_bytes(text, size):
    assert parse_bytes(text) == size


def test_shortens_long_values():
    assert show_value("x" * 58) == f"'{'x' * 58}' (string)"
    assert show_value("x" * 59) == f"'{'x' * 56}... (string)"
    assert show_value({"a": 1}) == "{'a': 1} (mapping)"
