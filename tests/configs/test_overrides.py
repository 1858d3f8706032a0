import copy

import pytest
from spmdkit.configs.load import apply_overrides


def applied(tree: dict, *overrides: str) -> dict:
    problems, _ = apply_overrides(tree, overrides)
    assert problems == []
    return tree


def test_reads_values_as_yaml():
    overrides = (
        "train.steps=20",
        "optimizer.learning_rate=3e-4",
        'data.files=["a/*.txt"]',
        "run.dir=",
        "run.x=b",
        "run.x=a=b",
    )
    assert applied({"train": {"steps": 1, "remat": "full"}}, *overrides) == {
        "train": {"steps": 20, "remat": "full"},
        "optimizer": {"learning_rate": 3e-4},
        "data": {"files": ["a/*.txt"]},
        "run": {"dir": None, "x": "a=b"},
    }


@pytest.mark.parametrize(
    ("words", "joined"),
    [
        (["strategy={fsdp:", "8}"], "strategy={fsdp: 8}"),
        (["data.files=[a.txt,", "b.txt]"], "data.files=[a.txt, b.txt]"),
        (
            ["optimizer={name:", "adamw,", "schedule:", "{name:", "cosine}}"],
            "optimizer={name: adamw, schedule: {name: c",
        ),
    ],
)
def test_a_value_that_the_shell_has_split_is_one_problem(words, joined):
    problems, _ = apply_overrides({}, ["train.steps=1", *words, "run.seed=2"])
    ((path, message),) = problems
    assert path == joined.partition("=")[0]
    assert message.startswith("the shell has split it at its spaces. Quote it: '" + joined)


def test_brackets_that_are_never_closed_are_problems_of_their_own():
    problems, _ = apply_overrides({}, ["strategy={fsdp:", "8"])
    assert [path for path, _ in problems] == ["strategy", "8"]


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
def test_merges_size_and_option_in_any_order(overrides, given):
    tree = copy.deepcopy(given)
    assert applied(tree, *overrides)["strategy"] == {"fsdp": {"size": 4, "floor_bytes": 1}}


FULL = {"strategy": {"fsdp": {"size": 8, "floor_bytes": 0}}}


@pytest.mark.parametrize(
    ("tree", "override", "expected"),
    [
        ({"train": {"steps": 1}}, "train.steps=2", {"train": {"steps": 2}}),
        ({"train": None}, "train.steps=1", {"train": {"steps": 1}}),
        ({"strategy": {"data": {"size": 8}}}, "strategy={fsdp: 2}", {"strategy": {"fsdp": 2}}),
        (FULL, "strategy.fsdp=2", {"strategy": {"fsdp": {"size": 2, "floor_bytes": 0}}}),
        (FULL, "strategy.fsdp.floor_bytes=1", {"strategy": {"fsdp": {"size": 8, "floor_bytes": 1}}}),
        (FULL, "strategy.fsdp={size: 4}", {"strategy": {"fsdp": {"size": 4}}}),
        ({"strategy": {"fsdp": 8, "data": 1}}, "strategy.fsdp.floor_bytes=1",
         {"strategy": {"fsdp": {"size": 8, "floor_bytes": 1}, "data": {"size": 1}}}),
        ({}, "layouts.rules.block/.*/w=[fsdp]", {"layouts": {"rules": {"block/.*/w": ["fsdp"]}}}),
        ({}, "optimizer.groups.a/.*/w={name: sgd}", {"optimizer": {"groups": {"a/.*/w": {"name": "sgd"}}}}),
        ({}, "optimizer.groups.a/.*/w.name=sgd", {"optimizer": {"groups": {"a/.*/w": {"name": "sgd"}}}}),
        ({}, "optimizer.groups.block.w={name: sgd}", {"optimizer": {"groups": {"block.w": {"name": "sgd"}}}}),
        ({}, "optimizer.groups.name={name: sgd}", {"optimizer": {"groups": {"name": {"name": "sgd"}}}}),
        ({}, "optimizer.groups={w: {name: sgd}}", {"optimizer": {"groups": {"w": {"name": "sgd"}}}}),
    ],
)  # fmt: skip
def test_overrides_one_key(tree, override, expected):
    assert applied(copy.deepcopy(tree), override) == expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "it must be key=value, such as train.steps=20."),
        ("=3", "it must be key=value, such as train.steps=20."),
        ("train..steps=3", "it must be key=value, such as train.steps=20."),
        ("a=[1", "invalid YAML: line 1, column 3: expected ',' or ']'"),
        ("seed.x=3", "seed is 1, which cannot have keys below it."),
    ],
)
def test_rejects_invalid_overrides(override, message):
    (problem,), given_by = apply_overrides({"seed": 1}, [override])
    assert problem.message.startswith(message)
    assert given_by == {problem.path: override}


def test_returns_the_override_of_each_key():
    _, given_by = apply_overrides({}, ["train.steps=3", "train.steps=4", "strategy.fsdp=2"])
    assert given_by == {"train.steps": "train.steps=4", "strategy.fsdp.size": "strategy.fsdp=2"}
