import itertools
import math
import time

import pytest
from spmdkit.configs.yaml_reader import read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),  # YAML 1.1: text
        ("1e6", 1e6),
        ("1.5E+3", 1500.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("-3", -3),
        ("1_000", "1_000"),  # YAML 1.1: a thousand
        ("1_0.5", "1_0.5"),
        ("0o17", 15),  # YAML 1.1: text
        ("0x1F", 31),
        ("010", 10),  # YAML 1.1: eight
        ("1:30", "1:30"),  # YAML 1.1: ninety
        ("on", "on"),  # YAML 1.1: true
        ("no", "no"),
        ("true", True),
        ("~", None),
        ("", None),
        ("2001-01-01", "2001-01-01"),  # YAML 1.1: a date
        (".inf", math.inf),
        ('"3e-4"', "3e-4"),
        ("local:2x4", "local:2x4"),
        ("[a, 1, null]", ["a", 1, None]),
    ],
)
def test_reads_scalars_of_yaml_1_2(text, value):
    document = read_yaml(text)
    assert (document.value, type(document.value)) == (value, type(value))
    assert document.problems == []


def test_records_the_line_of_every_key():
    document = read_yaml('# comment\ntrain:\n  steps: 3\nlayouts: {rules: {"a.*b": [x]}}\n')
    assert document.lines == {
        ("train",): 2,
        ("train", "steps"): 3,
        ("layouts",): 4,
        ("layouts", "rules"): 4,
        ("layouts", "rules", "a.*b"): 4,
    }


def test_rejects_a_duplicate_key():
    document = read_yaml("train:\n  steps: 1\n  seed: 2\n  steps: 3\n")
    (problem,) = document.problems
    assert problem.message == "line 4: train.steps is given twice, first on line 2. Keep one of them."
    assert document.value == {"train": {"steps": 1, "seed": 2}}


def test_resolves_aliases():
    assert read_yaml("a: &x [1, 2]\nb: *x").value == {"a": [1, 2], "b": [1, 2]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "invalid YAML: line 1, column 6: expected ',' or ']'"),
        ("a: 1\n---\nb: 2", "invalid YAML: line 2, column 1: but found another document"),
        ("a: !!python/object:os.system x", "line 1: the tag '!!python/object:os.system' is not supported. Remove it."),
        ("a: &x [*x]", "nest too deeply, or an alias contains itself"),
        ("a: \x00", "invalid YAML: "),
        ("a: !!int ten", "line 1: a: 'ten' is not a valid int."),
        ("{'': 1}", "line 1: a key is empty"),
        ("? [a, b]\n: 1", "line 1: a key must be a string"),
    ],
)
def test_rejects_invalid_text(text, message):
    (problem,) = read_yaml(text).problems
    assert message in problem.message


def test_aliases_of_aliases_expand_to_a_limit():
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    for before, name in itertools.pairwise("abcdefghij"):
        lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]")
    begin = time.monotonic()
    (problem,) = read_yaml("\n".join(lines)).problems
    assert "its aliases expand to more than 100,000 values, which no config needs" in problem.message
    assert time.monotonic() - begin < 30
    assert read_yaml("a: &a {x: 1}\nb: *a\nc: *a").value == {name: {"x": 1} for name in "abc"}
