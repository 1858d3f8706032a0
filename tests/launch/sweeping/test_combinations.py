"""Which runs the words of a sweep mean; plain text, so that every line of the table is a case."""

import re

import pytest
from spmdkit.configs import ConfigError
from spmdkit.launch.sweeping.combinations import LONGEST, combine, split_values


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("data,fsdp", ["data", "fsdp"]),
        ("1e-3, 3e-4", ["1e-3", "3e-4"]),
        ("one", ["one"]),
        ("", [""]),
        ("{data: 8},{data: 2, fsdp: 4}", ["{data: 8}", "{data: 2, fsdp: 4}"]),
        ("[a,b]", ["[a,b]"]),
        ("[a,[b,c]],[d]", ["[a,[b,c]]", "[d]"]),
        ('"a, b",c', ['"a, b"', "c"]),
        ("'a, b','c'", ["'a, b'", "'c'"]),
        ("'it''s, ok'", ["'it''s, ok'"]),
        ("'a'',b','c, d'", ["'a'',b'", "'c, d'"]),
        ("'',x", ["''", "x"]),
        (r'"a\", b",c', [r'"a\", b"', "c"]),
        ('{prompt: "a, }"},{prompt: b}', ['{prompt: "a, }"}', "{prompt: b}"]),
        ("{a: ', {'},b", ["{a: ', {'}", "b"]),
        ("don't,can't", ["don't", "can't"]),
        ("a],b", ["a]", "b"]),
        ("a,,b", ["a", "", "b"]),
        ("mine:make,yours:make", ["mine:make", "yours:make"]),
    ],
)
def test_values_are_parted_at_commas_outside_of_yamls_brackets(text, values):
    assert split_values(text) == values


def overrides(*words, **options):
    return [list(each.overrides) for each in combine(words, **options)]


def names(*words, **options):
    return [each.name for each in combine(words, **options)]


def test_every_combination_the_last_key_fastest():
    assert overrides("strategy=data,fsdp", "train.steps=5", "run.seed=0,1") == [
        ["train.steps=5", "strategy=data", "run.seed=0"],
        ["train.steps=5", "strategy=data", "run.seed=1"],
        ["train.steps=5", "strategy=fsdp", "run.seed=0"],
        ["train.steps=5", "strategy=fsdp", "run.seed=1"],
    ]
    assert len(combine(["a=1,2,3", "b=1,2", "c=1,2"])) == 3 * 2 * 2


def test_zipped_the_first_with_the_first():
    assert overrides("a=1,2", "b=3,4", zipped=True) == [["a=1", "b=3"], ["a=2", "b=4"]]


def test_values_are_as_they_were_typed():
    (first, second) = combine(["strategy={data: 8},{data: 2, fsdp: 4}", 'data.files=["a","b"]'])
    assert first.values == {"strategy": "{data: 8}"}
    assert second.overrides == ('data.files=["a","b"]', "strategy={data: 2, fsdp: 4}")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["strategy=data,fsdp"], ["strategy=data", "strategy=fsdp"]),
        (
            ["strategy=data,{data: 2, fsdp: 4}", "optimizer.learning_rate=1e-3,3e-4"],
            [
                "strategy=data,learning_rate=1e-3",
                "strategy=data,learning_rate=3e-4",
                "strategy=data-2-fsdp-4,learning_rate=1e-3",
                "strategy=data-2-fsdp-4,learning_rate=3e-4",
            ],
        ),
        (["optimizer.name=sgd,adam", "model.name=mlp,moe"], None),
        (["run.log_every=-1,1"], ["log_every=-1", "log_every=1"]),
        (['sample.prompt="../a b",/etc'], ["prompt=..-a-b", "prompt=-etc"]),
        (["a={x: 1},[x, 1]"], ["a=x-1", "a=x-1-2"]),
        (["a={x: 1},[x, 1],x-1-2"], ["a=x-1", "a=x-1-2", "a=x-1-2-2"]),
        (["a='',null"], ["a=none", "a=null"]),
    ],
)
def test_names_are_those_of_folders(words, expected):
    found = names(*words)
    assert found == expected or expected is None
    assert len({*found}) == len(found)
    assert all(re.fullmatch(r"[\w.+=,-]+", name) for name in found)


def test_keys_that_end_alike_are_named_in_full():
    assert names("optimizer.name=sgd,adam", "model.name=mlp,moe")[0] == "optimizer.name=sgd,model.name=mlp"


def test_a_long_name_is_cut_and_still_its_own():
    first, second = names(f"a={'x' * 300}1,{'x' * 300}2")
    assert len(first) == len(second) == LONGEST
    assert first != second


@pytest.mark.parametrize(
    ("words", "zipped", "problems"),
    [
        ([], False, ["no key has several values. Part them by commas, such as strategy=data,fsdp; one run is"]),
        (["train.steps=5"], False, ["no key has several values."]),
        (["data.files=[a,b]"], False, ["no key has several values."]),
        (["a=1,2", "a=3"], False, ["a is given twice, once with several values. Give all of them at once: a=1,2."]),
        (["a=1,2", "a=3,4"], False, ["a is given twice"]),
        (["a=1,,2"], False, ["a=1,,2: a value is empty. Give one on both sides of each comma, or put"]),
        (["a=1,2,1"], False, ["a=1,2,1: 1 is given twice. Give each value once."]),
        (["run.dir=a,b"], False, ["run.dir=a,b: each run gets a folder of its own in run.dir. Give one folder, or"]),
        (["a=1,2,3", "b=1,2"], True, ["--zip takes one value of each key for a run: a has 3 and b has 2. Give as"]),
        (
            [f"{key}={','.join(map(str, range(11)))}" for key in "abc"],
            False,
            ["11 x 11 x 11 = 1,331 combinations, and a sweep has 1,000 at most: a has 11 and b has 11 and c has 11."],
        ),
        (["a=1,,2", "b=1,1"], False, ["a=1,,2: a value is empty.", "b=1,1: 1 is given twice."]),
    ],
)
def test_what_cannot_be_combined(words, zipped, problems):
    with pytest.raises(ConfigError) as caught:
        combine(words, zipped=zipped)
    assert len(caught.value.problems) == len(problems)
    for found, said in zip(caught.value.problems, problems, strict=True):
        assert found.startswith(said)


def test_a_thousand_are_not_too_many():
    assert len(combine([f"{key}={','.join(map(str, range(10)))}" for key in "abc"])) == 1000
