import copy

import pytest
from spmdkit.configs.reading.overrides import apply_overrides


def applied(tree: dict, *overrides: str) -> dict:
    problems, _ = apply_overrides(tree, overrides)
    assert problems == []
    return tree


def test_values_are_yaml():
    overrides = ("train.steps=20", "optimizer.learning_rate=3e-4", 'data.files=["a/*.txt"]', "run.dir=", "run.x=a=b")
    assert applied({"train": {"steps": 1, "remat": "full"}}, *overrides) == {
        "train": {"steps": 20, "remat": "full"},
        "optimizer": {"learning_rate": 3e-4},
        "data": {"files": ["a/*.txt"]},
        "run": {"dir": None, "x": "a=b"},
    }


def test_the_last_one_wins():
    assert applied({}, "train.steps=1", "train.steps=2") == {"train": {"steps": 2}}


def test_a_whole_section():
    assert applied({"strategy": {"data": {"size": 8}}}, "strategy={fsdp: 2}") == {"strategy": {"fsdp": 2}}


def test_a_size_leaves_the_other_options():
    tree = {"strategy": {"fsdp": {"size": 8, "floor_bytes": 0}}}
    assert applied(tree, "strategy.fsdp=2") == {"strategy": {"fsdp": {"size": 2, "floor_bytes": 0}}}


def test_options_of_a_strategy():
    tree = {"strategy": {"fsdp": {"size": 8}}}
    assert applied(tree, "strategy.fsdp.floor_bytes=0")["strategy"]["fsdp"] == {"size": 8, "floor_bytes": 0}
    assert applied(tree, "strategy.fsdp={size: 4}")["strategy"]["fsdp"] == {"size": 4}


@pytest.mark.parametrize(
    "overrides",
    [
        ("strategy={fsdp: 4}", "strategy.fsdp.floor_bytes=1"),
        ("strategy.fsdp.floor_bytes=1", "strategy={fsdp: 4}"),
        ("strategy.fsdp=4", "strategy.fsdp.floor_bytes=1"),
        ("strategy.fsdp.floor_bytes=1", "strategy.fsdp=4"),
        ("strategy.fsdp=4", "strategy.fsdp={floor_bytes: 1}"),
    ],
)
@pytest.mark.parametrize("given", [{}, {"strategy": {"fsdp": 8}}, {"strategy": {"fsdp": {"size": 8}}}])
def test_an_option_below_a_plain_size_in_any_order(overrides, given):
    tree = copy.deepcopy(given)
    assert applied(tree, *overrides)["strategy"] == {"fsdp": {"size": 4, "floor_bytes": 1}}


def test_an_option_below_a_plain_size_of_the_file():
    tree = {"strategy": {"fsdp": 8, "data": 1}}
    assert applied(tree, "strategy.fsdp.floor_bytes=1") == {
        "strategy": {"fsdp": {"size": 8, "floor_bytes": 1}, "data": {"size": 1}}
    }


def test_patterns_keep_their_dots():
    assert applied({}, "layouts.rules.block/.*/w=[fsdp]") == {"layouts": {"rules": {"block/.*/w": ["fsdp"]}}}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.groups.block/.*/w={learning_rate: 1}", {"block/.*/w": {"learning_rate": 1}}),
        ("optimizer.groups.block/.*/w.learning_rate=1", {"block/.*/w": {"learning_rate": 1}}),
        ("optimizer.groups.block.w={name: sgd}", {"block.w": {"name": "sgd"}}),
        ("optimizer.groups.name={name: sgd}", {"name": {"name": "sgd"}}),
        ("optimizer.groups={w: {name: sgd}}", {"w": {"name": "sgd"}}),
    ],
)
def test_patterns_of_groups_keep_their_dots_too(override, expected):
    assert applied({}, override) == {"optimizer": {"groups": expected}}


def test_an_empty_section_is_filled():
    assert applied({"train": None}, "train.steps=1") == {"train": {"steps": 1}}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "it must be key=value, such as train.steps=20."),
        ("=3", "it must be key=value, such as train.steps=20."),
        ("train..steps=3", "it must be key=value, such as train.steps=20."),
        ("a=[1", "not valid YAML: line 1, column 3: expected ',' or ']'"),
        ("seed.x=3", "seed is 1 and has no keys below it."),
    ],
)
def test_bad_overrides(override, message):
    (problem,), given_by = apply_overrides({"seed": 1}, [override])
    assert problem.message.startswith(message)
    assert given_by == {problem.path: override}


def test_tells_which_override_set_what():
    _, given_by = apply_overrides({}, ["train.steps=3", "train.steps=4", "strategy.fsdp=2"])
    assert given_by == {"train.steps": "train.steps=4", "strategy.fsdp.size": "strategy.fsdp=2"}
