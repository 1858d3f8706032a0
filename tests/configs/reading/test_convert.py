import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from spmdkit.configs.reading.convert import parse_bytes, to_dataclass
from spmdkit.configs.reading.limits import AtLeast
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
    steps: Annotated[int, AtLeast(1)] = 1
    floor_bytes: int = 0
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.name == "files" and not self.files:
            raise UserError("section.name='files': section.files is empty.\nsection.name: it is short.")
        if self.count > 100:
            raise UserError(f"section.count={self.count} is too many.\nThe second line is a second problem.")


@dataclass(frozen=True, kw_only=True)
class Keyed:
    of: Mapping[str, Inner] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Needy:
    width: int


def convert(value: Any, cls: type = Section) -> tuple[Any, list[tuple[str, str]]]:
    problems: list = []
    return to_dataclass(cls, value, "section", problems), [tuple(problem) for problem in problems]


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ({"count": 3}, "count", 3),
        ({"count": 1e1}, "count", 10),
        ({"rate": 1}, "rate", 1.0),
        ({"flag": True}, "flag", True),
        ({"mode": "full"}, "mode", "full"),
        ({"mode": None}, "mode", "none"),
        ({"maybe": None}, "maybe", None),
        ({"maybe": 3}, "maybe", 3),
        ({"files": ["a", "b"]}, "files", ("a", "b")),
        ({"betas": [0.5, 1]}, "betas", (0.5, 1.0)),
        ({"options": {"x": [1]}}, "options", {"x": [1]}),
        ({"floor_bytes": "64KiB"}, "floor_bytes", 65536),
        ({"inner": {"depth": 2}}, "inner", Inner(depth=2)),
        ({"inner": None}, "inner", Inner()),
        (None, "count", 1),
    ],
)
def test_right_types(given, name, expected):
    section, problems = convert(given)
    assert problems == []
    assert getattr(section, name) == expected
    assert type(getattr(section, name)) is type(expected)


@pytest.mark.parametrize(
    ("given", "path", "message"),
    [
        ({"count": "ten"}, "count", "section.count must be a whole number, not 'ten' (text)."),
        ({"count": 1.5}, "count", "section.count must be a whole number, not 1.5 (a number)."),
        ({"count": True}, "count", "section.count must be a whole number, not True (true or false)."),
        ({"count": None}, "count", "section.count must be a whole number, not null (nothing)."),
        ({"flag": 1}, "flag", "section.flag must be true or false, not 1 (a whole number)."),
        ({"name": 7}, "name", "section.name must be text, not 7 (a whole number). Quote it to make it text: '\"7\"'."),
        ({"mode": "ful"}, "mode", "section.mode must be one of none, full (Did you mean full?), not 'ful' (text)."),
        ({"maybe": "x"}, "maybe", "section.maybe must be a whole number or null, not 'x' (text)."),
        ({"files": "a.txt"}, "files", "section.files must be a list of text, not 'a.txt' (text)."),
        ({"betas": [1]}, "betas", "section.betas must be a list of 2 values, not [1] (a list)."),
        ({"options": 3}, "options", "section.options must be a mapping (key: value), not 3 (a whole number)."),
        ({"rate": math.nan}, "rate", "section.rate must be a number, and finite, not nan (a number)."),
        ({"rate": math.inf}, "rate", "section.rate must be a number, and finite, not inf (a number)."),
        ({"steps": 0}, "steps", "section.steps must be at least 1, not 0 (a whole number)."),
        ({"floor_bytes": "big"}, "floor_bytes", "section.floor_bytes must be a whole number, not 'big' (text)."),
        ({"conut": 1}, "conut", "section.conut is not a key. Did you mean section.count?"),
        ({"inner": {"dept": 1}}, "inner.dept", "section.inner.dept is not a key. Did you mean section.inner.depth?"),
        ({"inner": 3}, "inner", "section.inner must be a mapping (key: value), not 3 (a whole number)."),
    ],
)
def test_wrong_types(given, path, message):
    section, problems = convert(given)
    assert problems == [(f"section.{path}", message)]
    assert section == Section()


def test_an_unknown_key_near_to_nothing_lists_all():
    _, [(_, message)] = convert({"zzz": 1}, Inner)
    assert message == "section.zzz is not a key. The keys here: depth."


def test_all_problems_are_noted_and_the_rest_is_kept():
    section, problems = convert({"count": "x", "rate": "y", "flag": True})
    assert [path for path, _ in problems] == ["section.count", "section.rate"]
    assert section == Section(flag=True)


def test_what_the_dataclass_refuses():
    section, problems = convert({"count": 101, "flag": True})
    assert problems == [
        ("section.count", "section.count=101 is too many."),
        ("section", "The second line is a second problem."),
    ]
    assert section == Section()


def test_a_key_that_must_be_given():
    assert convert({}, Needy) == (None, [("section.width", "section.width must be given.")])
    assert convert({"width": 3}, Needy) == (Needy(width=3), [])
    assert len(convert({"width": "x"}, Needy)[1]) == 1


def test_options_by_key():
    assert convert({"of": {"a/.*": {"depth": 3}, "b": None}}, Keyed) == (
        Keyed(of={"a/.*": Inner(depth=3), "b": Inner()}),
        [],
    )
    section, problems = convert({"of": {"a/.*": {"depth": "x"}, "b": {"dept": 1}, "c": 3, "d": {"depth": 2}}}, Keyed)
    assert section == Keyed(of={"d": Inner(depth=2)})
    assert problems == [
        ("section.of.a/.*.depth", "section.of.a/.*.depth must be a whole number, not 'x' (text)."),
        ("section.of.b.dept", "section.of.b.dept is not a key. Did you mean section.of.b.depth?"),
        ("section.of.c", "section.of.c must be a mapping (key: value), not 3 (a whole number)."),
    ]
    assert convert({"of": 3}, Keyed)[1] == [
        ("section.of", "section.of must be a mapping (key: value), not 3 (a whole number).")
    ]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64KiB", 65536),
        ("1.5 MiB", 1572864),
        ("2GB", 2 * 10**9),
        ("100", 100),
        ("7B", 7),
        ("KiB", "KiB"),
        ("0.3B", "0.3B"),
    ],
)
def test_bytes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "given",
    [{"name": "files", "files": "a.txt"}, {"name": "files", "files": 3}, {"name": "files", "fils": ["a.txt"]}],
)
def test_what_only_follows_from_another_mistake_is_not_told(given):
    """Files that were given in the wrong form, or under the wrong name, are not missing."""
    _, problems = convert(given)
    assert [message.partition(" ")[0] for _, message in problems] == [
        "section.files" if "files" in given else "section.fils",
        "section.name:",
    ]
    _, problems = convert({"name": "files"})
    assert [message for _, message in problems] == [
        "section.name='files': section.files is empty.",
        "section.name: it is short.",
    ]
